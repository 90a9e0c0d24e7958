"""Cameras on loopback: MPEG-TS over HTTP, and RTSP with RTP in its TCP connection."""

from __future__ import annotations

import contextlib
import io
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import av
from PIL import Image

SIZE = (64, 48)
RATE = 25  # images a second
_SDP = (
    "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=camera\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\n"
    "m=video 0 RTP/AVP 96\r\na=rtpmap:96 H264/90000\r\na=fmtp:96 packetization-mode=1\r\n"
    "a=control:track0\r\n"
)


def encoded(stream: av.VideoStream, number: int) -> list[Any]:
    """An image that gets lighter."""
    image = Image.new("RGB", SIZE, (40 + 3 * (number % 70), 90, 90))
    frame = av.VideoFrame.from_image(image)
    frame.pts = number
    return list(stream.encode(frame))


def add_stream(container: av.container.OutputContainer, codec: str) -> av.VideoStream:
    fast = {"tune": "zerolatency", "preset": "ultrafast"} if codec == "libx264" else {}
    stream: Any = container.add_stream(codec, rate=RATE, options=fast)
    stream.width, stream.height = SIZE
    stream.codec_context.gop_size = 5
    assert isinstance(stream, av.VideoStream)
    return stream


class Camera:
    """Accepts connections one after another; each gets images until it is cut off."""

    scheme = ""

    def __init__(self) -> None:
        self._cut_off = threading.Event()
        self.num_connections = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, daemon=True)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self._listening.getsockname()[1]}/live"

    def cut_off(self) -> None:
        """End the connection; another may follow."""
        self._cut_off.set()

    def __enter__(self) -> Camera:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join()

    def _accept(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError):
                connection, _ = self._listening.accept()
                self._cut_off.clear()
                self.num_connections += 1
                with connection:
                    self.serve(connection)

    def _numbers(self) -> Iterator[int]:
        """Numbers of images, at their rate."""
        number = 0
        while not self._closed.is_set() and not self._cut_off.is_set():
            yield number
            number += 1
            time.sleep(1 / RATE)

    def serve(self, connection: socket.socket) -> None:
        raise NotImplementedError


class HttpCamera(Camera):
    """MPEG-TS, without an end."""

    scheme = "http"

    def serve(self, connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Type: video/mp2t\r\n\r\n")
        buffer = io.BytesIO()
        with av.open(buffer, "w", format="mpegts") as container:
            stream = add_stream(container, "mpeg2video")
            for number in self._numbers():
                container.mux(encoded(stream, number))
                connection.sendall(buffer.getvalue())
                buffer.seek(0)
                buffer.truncate()


class RtspCamera(Camera):
    """RTSP as RFC 2326 has it; FFmpeg makes RTP, which goes out between the answers."""

    scheme = "rtsp"

    def serve(self, connection: socket.socket) -> None:
        requests = connection.makefile("rb")
        while (request := self._request(requests)) is not None:
            method, number = request
            headers, body = self._answer(method)
            length = f"Content-Length: {len(body)}\r\n" if body else ""
            answer = f"RTSP/1.0 200 OK\r\nCSeq: {number}\r\n{headers}{length}\r\n{body}"
            connection.sendall(answer.encode())
            if method == "PLAY":
                self._play(connection)
                return

    def _request(self, requests: io.BufferedReader) -> tuple[str, str] | None:
        lines = []
        while line := requests.readline().decode().strip():
            lines.append(line)
        if not lines:
            return None
        number = re.search(r"CSeq: (\d+)", "\n".join(lines))
        assert number, "a request has its number"
        return lines[0].split()[0], number[1]

    def _answer(self, method: str) -> tuple[str, str]:
        match method:
            case "OPTIONS":
                return "Public: OPTIONS, DESCRIBE, SETUP, PLAY, TEARDOWN\r\n", ""
            case "DESCRIBE":
                return f"Content-Type: application/sdp\r\nContent-Base: {self.url}/\r\n", _SDP
            case "SETUP":
                return "Transport: RTP/AVP/TCP;unicast;interleaved=0-1\r\nSession: 1\r\n", ""
            case _:
                return "Session: 1\r\n", ""

    def _play(self, connection: socket.socket) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as rtp:
            rtp.bind(("127.0.0.1", 0))
            rtp.setblocking(False)
            target = f"rtp://127.0.0.1:{rtp.getsockname()[1]}"
            with av.open(target, "w", format="rtp", options={"payload_type": "96"}) as container:
                stream = add_stream(container, "libx264")
                for number in self._numbers():
                    container.mux(encoded(stream, number))
                    with contextlib.suppress(BlockingIOError):
                        while packet := rtp.recv(65536):
                            connection.sendall(b"$\0" + len(packet).to_bytes(2) + packet)
