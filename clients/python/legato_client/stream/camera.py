"""Frames of files, V4L2 devices and network streams. Needs PyAV and Pillow."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from legato_client._images.sources import ImageInput, RawFrame
from legato_client.batch import video
from legato_client.stream.frames import Backoff, CapturedFrame, FrameCounters, SourceClock

if TYPE_CHECKING:
    from PIL import Image

_SILENCE = 10.0
"""Seconds without a packet after which a device or stream counts as lost."""


@dataclasses.dataclass(frozen=True, slots=True)
class FrameEncoding:
    """Encoding of frames: scaled down to `max_side` pixels, as RGB or JPEG."""

    max_side: int | None = None
    jpeg: int | None = None

    def encode(self, image: Image.Image) -> ImageInput:
        if self.max_side is not None:
            image.thumbnail((self.max_side, self.max_side))
        if self.jpeg is None:
            return RawFrame(image.tobytes(), image.width, image.height, "rgb8")
        data = io.BytesIO()
        image.save(data, "JPEG", quality=self.jpeg)
        return data.getvalue()


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Video source; a file ends, any other source is reopened.

    `name` may hold a password, `shown` does not.
    """

    name: str
    shown: str
    is_file: bool
    container: str | None
    options: dict[str, str]


def parse_source(name: str, *, size: str | None = None, fps: float | None = None) -> Source:
    """Parse a file, a device (`/dev/video0`), or an FFmpeg URL; other options are for devices."""
    if name.startswith("/dev/video"):
        asked = {"video_size": size, "framerate": None if fps is None else f"{fps:g}"}
        options = {key: value for key, value in asked.items() if value is not None}
        return Source(name, name, False, "v4l2", options)
    if "://" in name and not name.startswith("file:"):
        options = {"fflags": "nobuffer", "analyzeduration": "1000000"}  # µs, the minimum that works
        if name.startswith(("rtsp://", "rtsps://")):
            options["rtsp_transport"] = "tcp"  # a lost UDP packet corrupts frames
        parts = urllib.parse.urlsplit(name)
        shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()  # no password
        return Source(name, shown, False, None, options)
    return Source(name, os.path.basename(name), True, None, {})


class Camera:
    """Reader of a source's frames, each with its capture time.

    A file is played at `rate` times its own speed. A lost device or stream is reopened for
    `patience` seconds, None: for ever; the first opening must succeed.
    """

    def __init__(
        self,
        source: Source,
        on_frame: Callable[[CapturedFrame], None],
        counters: FrameCounters,
        *,
        encoding: FrameEncoding,
        rate: float = 1.0,
        patience: float | None,
    ) -> None:
        self._source = source
        self._on_frame = on_frame
        self._counters = counters
        self._encoding = encoding
        self._rate = rate
        self._backoff = Backoff(patience)
        self._stopped = threading.Event()
        self._count = 0
        self._begin_ns: int | None = None

    def stop(self) -> None:
        """End soon; thread-safe."""
        self._stopped.set()

    def run(self) -> None:
        """Return at the end of a file, or when stopped.

        Raises:
            ModuleNotFoundError: PyAV is not installed.
            OSError, ValueError: the source cannot be opened, or patience has ended.
        """
        while not self._stopped.is_set():
            try:
                self._play()
                if self._source.is_file or self._stopped.is_set():
                    break
                problem = OSError(errno.ENODATA, "the stream ended", self._source.shown)
            except (OSError, ValueError) as error:
                if self._source.is_file or self._count == 0:
                    raise self._named(error) from None
                named = self._named(error)
                problem = named if isinstance(named, OSError) else OSError(str(named))
            self._counters.source = f"lost: {problem.strerror or problem}"
            delay = self._backoff.next_delay()
            if delay is None:
                raise problem
            self._stopped.wait(delay)

    def _named(self, error: OSError | ValueError) -> OSError | ValueError:
        """Return the error without a password."""
        source = self._source
        if source.is_file:
            return error
        if isinstance(error, OSError):
            return OSError(error.errno, error.strerror, source.shown)
        return ValueError(str(error).replace(source.name, source.shown))

    def _play(self) -> None:
        source, before = self._source, self._count
        decoded = video.decoded(
            source.name, source.container, source.options, None if source.is_file else _SILENCE
        )
        with_times = self._paced(decoded) if source.is_file else self._arriving(decoded)
        for frame, captured_ns in with_times:
            if self._stopped.is_set():
                return
            if self._count == before:
                if before:
                    self._counters.count("source_reconnects")
                self._counters.source = "playing" if source.is_file else "running"
                self._backoff.note_success()
            self._on_frame(self._captured(frame, captured_ns))

    def _captured(self, frame: video.DecodedFrame, captured_ns: int) -> CapturedFrame:
        if self._begin_ns is None:
            self._begin_ns = captured_ns
        # A stream's own times restart with each connection.
        time = frame.time if self._source.is_file else (captured_ns - self._begin_ns) / 1e9
        number, self._count = self._count, self._count + 1

        def read() -> ImageInput:
            return self._encoding.encode(frame.image())

        return CapturedFrame(number, time, captured_ns, read, frame.image, self._source.shown)

    def _paced(
        self, frames: Iterator[video.DecodedFrame]
    ) -> Iterator[tuple[video.DecodedFrame, int]]:
        """Yield frames at the file's own pace; the capture time is the due time."""
        begin_ns = time.time_ns()
        delay_ns = 0
        for frame in frames:
            due_ns = begin_ns + delay_ns + round(frame.time / self._rate * 1e9)
            late = (time.time_ns() - due_ns) / 1e9
            if late < 0:
                self._stopped.wait(-late)
            elif late > 0.5:  # decoding or the receiver is slower: shift the later frames
                delay_ns += round(late * 1e9)
                due_ns += round(late * 1e9)
            yield frame, due_ns

    def _arriving(
        self, frames: Iterator[video.DecodedFrame]
    ) -> Iterator[tuple[video.DecodedFrame, int]]:
        clock = SourceClock()
        for frame in frames:
            yield frame, clock.captured_ns(frame.time, time.time_ns())
