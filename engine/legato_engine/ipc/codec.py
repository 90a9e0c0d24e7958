"""Commands and messages as msgpack."""

from __future__ import annotations

import msgspec

from legato_engine.ipc.commands import Command
from legato_engine.ipc.messages import EngineMessage

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_engine_message = msgspec.msgpack.Decoder(EngineMessage).decode
