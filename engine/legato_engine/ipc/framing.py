"""Framing of messages: four bytes of length, little-endian, then the message."""

from __future__ import annotations

import collections
import socket
import struct

_LENGTH = struct.Struct("<I")
_READ_SIZE = 256 * 1024
_WRITE_SIZE = 1024 * 1024  # bytes joined for one system call
_FEW_PIECES = 32  # joined without checking their total size


class FrameWriter:
    """A queue of messages to send, in order."""

    def __init__(self) -> None:
        self._pieces: collections.deque[bytes] = collections.deque()

    def add(self, message: bytes) -> None:
        self._pieces.append(_LENGTH.pack(len(message)))
        self._pieces.append(message)

    def clear(self) -> None:
        self._pieces.clear()

    def write_to(self, connection: socket.socket) -> bool:
        """Send to a non-blocking socket; return whether the queue is empty.

        Raises:
            OSError: the other end is closed.
        """
        while self._pieces:
            data = self._join()
            try:
                sent = connection.send(data)
            except BlockingIOError:
                sent = 0
            if sent < len(data):
                self._pieces.appendleft(data[sent:])
                return False
        return True

    def _join(self) -> bytes:
        if len(self._pieces) <= _FEW_PIECES:
            data = b"".join(self._pieces)
            self._pieces.clear()
            return data
        pieces: list[bytes] = []
        size = 0
        while self._pieces and size < _WRITE_SIZE:
            pieces.append(self._pieces.popleft())
            size += len(pieces[-1])
        return b"".join(pieces)


class FrameReader:
    """Splitter of bytes into messages."""

    def __init__(self) -> None:
        self._buffer: bytes | bytearray = b""
        self.ended = False
        self.more = False  # the last read filled its buffer

    def read_from(self, connection: socket.socket) -> bool:
        """Read once from a non-blocking socket; return whether bytes were received.

        Raises:
            OSError: the connection is broken.
        """
        if self.ended:
            return False
        try:
            data = connection.recv(_READ_SIZE)
        except BlockingIOError:
            return False
        self.ended = not data
        self.more = len(data) == _READ_SIZE
        if self._buffer:
            self._buffer += data
        else:
            self._buffer = data  # usually a read ends with a message: no copy
        return bool(data)

    def take(self) -> list[bytes]:
        frames: list[bytes] = []
        buffer, size = self._buffer, len(self._buffer)
        start = 0
        while (begin := start + _LENGTH.size) <= size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if begin + length > size:
                break
            start = begin + length
            frames.append(bytes(buffer[begin:start]))
        if start:
            self._buffer = bytearray(buffer[start:]) if start < size else b""
        return frames
