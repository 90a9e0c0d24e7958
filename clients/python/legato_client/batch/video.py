"""Frames of videos, and videos of frames. Needs PyAV (`pip install "legato[video]"`)."""

from __future__ import annotations

import contextlib
import dataclasses
import fractions
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from legato_client._images.sources import RawFrame

if TYPE_CHECKING:
    import av
    from PIL import Image

_TICK = fractions.Fraction(1, 90_000)  # seconds; the unit of times in MPEG
_SQUARE = fractions.Fraction(1)
_MAX_STRETCH = 8  # aspect ratio of pixels; a larger one counts as broken
_ENCODERS = ("libx264", "mpeg4")  # the best first; the second is in every build of FFmpeg


@dataclasses.dataclass(frozen=True, slots=True)
class FrameChoice:
    """Frame selection: every Nth frame, or the first frame of each 1/`fps` seconds."""

    every: int = 1
    fps: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class DecodedFrame:
    """A decoded frame; `number` counts from 0, `time` is in seconds from the first frame.

    `pixel_aspect` is the width of a stored pixel divided by its height.
    """

    number: int
    time: float
    decoded: av.VideoFrame
    pixel_aspect: fractions.Fraction = _SQUARE

    def image(self) -> Image.Image:
        """Return the frame as players show it: with square pixels, mirrored and turned."""
        image: Image.Image = self.decoded.to_image()  # type: ignore[no-untyped-call]  # PyAV's gap
        width, height, aspect = *image.size, self.pixel_aspect
        if 1 < aspect <= _MAX_STRETCH:
            image = image.resize((round(width * aspect), height))
        elif 1 > aspect >= 1 / _MAX_STRETCH:
            image = image.resize((width, round(height / aspect)))
        return _as_displayed(image, self.decoded)

    def read(self) -> RawFrame:
        image = self.image()
        return RawFrame(image.tobytes(), image.width, image.height, "rgb8")


def _as_displayed(image: Image.Image, decoded: av.VideoFrame) -> Image.Image:
    """Apply the display matrix: x becomes a x + c y, and y becomes b x + d y."""
    matrix: Any = decoded.side_data.get("DISPLAYMATRIX")  # a buffer, typed as `object`
    if matrix is None:
        return image
    a, b, _, c, d, *_ = struct.unpack_from("=9i", matrix)
    if a * d < b * c:
        from PIL import Image

        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        a, b = -a, -b
    clockwise = round(math.degrees(math.atan2(b, a)))
    return image.rotate(-clockwise, expand=True) if clockwise else image


def frames(path: str, choice: FrameChoice) -> Iterator[DecodedFrame]:
    """Yield the chosen frames, in order. Raises as `decoded`."""
    due = 0.0
    for frame in decoded(path):
        if choice.fps is None:
            chosen = frame.number % choice.every == 0
        else:
            chosen = frame.time * choice.fps >= due - 1e-6  # times are rounded
            due = int(frame.time * choice.fps + 1e-6) + 1 if chosen else due
        if chosen:
            yield frame


def decoded(
    path: str,
    container: str | None = None,
    options: Mapping[str, str] = MappingProxyType({}),
    silence: float | None = None,
) -> Iterator[DecodedFrame]:
    """Decode all frames of a file, or of any other FFmpeg source, in order.

    `container` and `options` are FFmpeg's. With `silence`, in seconds, the source is live: each
    frame comes as soon as it is decoded, and none for so long is an error.

    Raises:
        ModuleNotFoundError: PyAV is not installed.
        OSError, ValueError: the source cannot be read, or not to its end.
    """
    import av

    with (
        _plain_errors(path),
        av.open(path, format=container, options=dict(options), timeout=silence) as opened,
    ):
        if not opened.streams.video:
            raise ValueError(f"{path} has no images")
        stream = opened.streams.video[0]
        # Threads that decode frames side by side hold some of them back.
        stream.thread_type = "AUTO" if silence is None else "SLICE"
        start = None
        for number, each in enumerate(opened.decode(stream)):
            time = each.time or 0.0
            start = time if start is None else start
            yield DecodedFrame(number, time - start, each, stream.sample_aspect_ratio or _SQUARE)


class VideoWriter:
    """Writer of an MP4 file of frames, each shown from its time on.

    The first one gives the size, in even pixels; those of another size are fitted to it.
    """

    def __init__(self, path: Path) -> None:
        import av

        encoder = next(name for name in _ENCODERS if name in av.codecs_available)
        self._path = str(path)
        with _plain_errors(self._path):
            self._container = av.open(self._path, "w", format="mp4")
        stream = self._container.add_stream(encoder)
        assert isinstance(stream, av.VideoStream), "the encoder is a video's"
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = _TICK
        self._stream = stream
        self._size: tuple[int, int] | None = None

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        with _plain_errors(self._path), self._container:
            if error is None:
                self._container.mux(self._stream.encode())

    def write(self, image: Image.Image, time: float) -> None:
        """Add a frame. `time` is in seconds and grows.

        Raises OSError, as the end of the block does.
        """
        import av

        if self._size is None:
            self._size = image.size
            # A new stream has a size of PyAV's own, 640 x 480.
            self._stream.width, self._stream.height = (side // 2 * 2 for side in image.size)
        if image.size != self._size:
            image = image.resize(self._size)
        cropped = image.crop((0, 0, self._stream.width, self._stream.height))
        frame = av.VideoFrame.from_image(cropped)  # type: ignore[no-untyped-call]  # PyAV's gap
        frame.pts, frame.time_base = round(time / _TICK), _TICK
        with _plain_errors(self._path):
            self._container.mux(self._stream.encode(frame))


@contextlib.contextmanager
def _plain_errors(path: str) -> Iterator[None]:
    """Raise FFmpeg's errors as OSError, without its own classes."""
    import av

    try:
        yield
    except av.FFmpegError as error:
        raise OSError(error.errno, error.strerror, path) from error
