"""A gRPC call written to a socket as HTTP/2 frames, for headers that no client library sends."""

from __future__ import annotations

import socket
import struct

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_FRAME_HEADER = 9


class RawCall:
    """One call on a connection of its own; with `ends`, `messages` are all of the client's."""

    def __init__(
        self,
        address: str,
        method: str,
        messages: list[bytes],
        headers: dict[str, str],
        *,
        ends: bool = True,
        wait: float = 20.0,
    ) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=wait)
        self._unread = b""
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": address,
            "te": "trailers",
            "content-type": "application/grpc",
            **headers,
        }
        block = b"".join(map(_literal, fields.items()))
        body = b"".join(struct.pack(">BI", 0, len(each)) + each for each in messages)
        self._socket.sendall(
            _PREFACE
            + _frame(_SETTINGS, 0, 0, b"")
            + _frame(_HEADERS, _END_HEADERS, 1, block)
            + _frame(_DATA, _END_STREAM if ends else 0, 1, body)
        )

    def end(self) -> bytes:
        """Read until the call has ended; return all that the server sent as data and headers."""
        received = b""
        while True:
            kind, flags, stream, payload = self._read()
            if kind == _SETTINGS and not flags & _ACK:
                self._socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))
            if kind == _PING and not flags & _ACK:
                self._socket.sendall(_frame(_PING, _ACK, 0, payload))
            if stream == 1 and kind in (_DATA, _HEADERS):
                received += payload
            ended = stream == 1 and (kind == _RST_STREAM or flags & _END_STREAM)
            if kind == _GOAWAY or (ended and kind in (_DATA, _HEADERS, _RST_STREAM)):
                return received

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _read(self) -> tuple[int, int, int, bytes]:
        head = self._exactly(_FRAME_HEADER)
        size = int.from_bytes(head[:3], "big")
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        return kind, flags, stream, self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        while len(self._unread) < size:
            received = self._socket.recv(1 << 16)
            assert received, "the server closed the connection"
            self._unread += received
        taken, self._unread = self._unread[:size], self._unread[size:]
        return taken


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(field: tuple[str, str]) -> bytes:
    """A header field without indexing and without Huffman coding."""
    name, value = (part.encode() for part in field)
    assert len(name) < 127 > len(value)
    return bytes((0, len(name))) + name + bytes((len(value),)) + value
