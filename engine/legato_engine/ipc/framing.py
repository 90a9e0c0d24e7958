"""Messages on a byte stream: each is its length, four bytes little-endian, and its bytes."""

from __future__ import annotations

import collections
import socket
import struct

_LENGTH = struct.Struct("<I")
_READ_SIZE = 256 * 1024
_WRITE_SIZE = 1024 * 1024  # joined for one system call
_FEW = 32  # pieces that are joined without a look at their sizes


class FrameWriter:
    """Messages on their way out, in order."""

    def __init__(self) -> None:
        self._pieces: collections.deque[bytes] = collections.deque()

    def add(self, message: bytes) -> None:
        """Enqueue a message."""
        self._pieces.append(_LENGTH.pack(len(message)))
        self._pieces.append(message)

    def clear(self) -> None:
        """Forget what was not sent."""
        self._pieces.clear()

    def write_to(self, connection: socket.socket) -> bool:
        """Send until the queue is empty or the non-blocking `connection` takes no more.

        Whether the queue is empty now. Raises `OSError` when the other end is gone.
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
        """Takes the first pieces off the queue."""
        if len(self._pieces) <= _FEW:
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
    """Messages on their way in; `ended` once the other end closed.

    `more` says that the last reading took all that it could, so that there may be more.
    """

    def __init__(self) -> None:
        self._buffer: bytes | bytearray = b""  # what came and was not taken
        self.ended = False
        self.more = False

    def read_from(self, connection: socket.socket) -> bool:
        """Read once from the non-blocking `connection`; whether anything came.

        Raises `OSError` when the connection broke.
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
            self._buffer = data  # nearly always: messages are read whole, and not copied before
        return bool(data)

    def take(self) -> list[bytes]:
        """The messages that are complete, in order."""
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
