"""The control channel between the first service process and a worker.

Its end tells each process that the other one is gone.
"""

from __future__ import annotations

import asyncio
import socket

import msgspec

from legato_service.metrics.snapshot import Snapshot

_MAX_MESSAGE = 64 * 1024 * 1024  # bytes


class Serving(msgspec.Struct, frozen=True, tag=True):
    """From a worker: it serves requests."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """From a worker: have all processes drain. To a worker: drain."""

    grace: float  # seconds


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """To a worker: report not serving, and serve on."""


class Collect(msgspec.Struct, frozen=True, tag=True):
    """Reply with `Collected`: a worker with its metrics, the first process with those of all."""

    number: int


class Collected(msgspec.Struct, frozen=True, tag=True):
    """The reply to the `Collect` of this number."""

    number: int
    snapshot: Snapshot


Message = Serving | Drain | Withdraw | Collect | Collected

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Message).decode


class ControlChannel:
    """One end of a control channel; messages are lines of JSON."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, connection: socket.socket) -> ControlChannel:
        """The channel owns the connected socket."""
        return cls(*await asyncio.open_unix_connection(sock=connection, limit=_MAX_MESSAGE))

    def send(self, message: Message) -> None:
        """Without effect when the other end is closed."""
        self._writer.write(_encode(message) + b"\n")

    async def receive(self) -> Message | None:
        """Return None when the other end is closed."""
        try:
            line = await self._reader.readline()
        except ConnectionError:
            return None
        return _decode(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        self._writer.close()
