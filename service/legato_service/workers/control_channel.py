"""The control channel between the first service process and a worker.

Its end tells each process that the other one is gone.
"""

from __future__ import annotations

import asyncio
import socket

import msgspec


class Serving(msgspec.Struct, frozen=True, tag=True):
    """From a worker: it serves requests."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """From a worker: have all processes drain. To a worker: drain."""

    grace: float  # seconds


Message = Serving | Drain

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Message).decode


class ControlChannel:
    """One end of a control channel; messages are lines of JSON."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, connection: socket.socket) -> ControlChannel:
        """Open an end on a connected socket, which it owns from now on."""
        return cls(*await asyncio.open_unix_connection(sock=connection))

    def send(self, message: Message) -> None:
        """Send a message; without effect when the other end is closed."""
        self._writer.write(_encode(message) + b"\n")

    async def receive(self) -> Message | None:
        """Return the next message, or None when the other end is closed."""
        try:
            line = await self._reader.readline()
        except ConnectionError:
            return None
        return _decode(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        """Close this end."""
        self._writer.close()
