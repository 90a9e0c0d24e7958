"""The line between the first service process and one beside it; its end is the other's death."""

from __future__ import annotations

import asyncio
import socket

import msgspec


class Serving(msgspec.Struct, frozen=True, tag=True):
    """To the first: requests are served."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """To the first: have everybody drain. From it: drain."""

    grace: float  # seconds


Note = Serving | Leave

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Note).decode


class Line:
    """One end; notes are JSON, one a line."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, connection: socket.socket) -> Line:
        """An end on a connected socket, which it owns from now on."""
        return cls(*await asyncio.open_unix_connection(sock=connection))

    def send(self, note: Note) -> None:
        """Tell the other end; harmless when it is gone."""
        self._writer.write(_encode(note) + b"\n")

    async def receive(self) -> Note | None:
        """The next note; None when the other end is gone."""
        try:
            line = await self._reader.readline()
        except ConnectionError:
            return None
        return _decode(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        """Hang up."""
        self._writer.close()
