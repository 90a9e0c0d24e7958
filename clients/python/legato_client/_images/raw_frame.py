"""Pixels as a camera or a robot's driver holds them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from legato.v1 import media_pb2

if TYPE_CHECKING:
    import numpy as np

PixelFormat = Literal["rgb8", "bgr8", "rgba8", "bgra8", "mono8", "nv12", "yuyv"]
Pixels: TypeAlias = "bytes | bytearray | memoryview | np.ndarray[Any, Any]"

_FORMATS: dict[str, tuple[media_pb2.PixelFormat.ValueType, int]] = {  # and bytes of a row's pixel
    "rgb8": (media_pb2.PIXEL_FORMAT_RGB8, 3),
    "bgr8": (media_pb2.PIXEL_FORMAT_BGR8, 3),
    "rgba8": (media_pb2.PIXEL_FORMAT_RGBA8, 4),
    "bgra8": (media_pb2.PIXEL_FORMAT_BGRA8, 4),
    "mono8": (media_pb2.PIXEL_FORMAT_MONO8, 1),
    "nv12": (media_pb2.PIXEL_FORMAT_NV12, 1),
    "yuyv": (media_pb2.PIXEL_FORMAT_YUYV, 2),
}
FORMAT_OF_CHANNELS: dict[int, PixelFormat] = {1: "mono8", 3: "rgb8", 4: "rgba8"}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RawFrame:
    """Pixels without a file format: any bytes-like `data`, an array included, and their shape.

    `width` and `height` are in pixels, `stride` in bytes from row to row; 0 means rows without
    padding. "bgr8" is OpenCV's order; "nv12" and "yuyv" are what cameras give, and the server must
    have the capability `pixel_format.nv12` or `pixel_format.yuyv`. Raises ValueError for a shape
    that cannot be, or more pixels than bytes.
    """

    data: Pixels
    width: int
    height: int
    format: PixelFormat
    stride: int = 0

    def __post_init__(self) -> None:
        if self.format not in _FORMATS:
            raise ValueError(f"format must be one of {sorted(_FORMATS)}, got {self.format!r}")
        if self.width < 1 or self.height < 1:
            raise ValueError(f"need at least one pixel, got {self.width} x {self.height}")
        if self.stride and self.stride < self._row_bytes:
            raise ValueError(f"a row has {self._row_bytes} bytes, the stride is {self.stride}")
        given, needed = _view(self.data).nbytes, self._least_bytes
        if given < needed:
            raise ValueError(
                f"{self.width} x {self.height} {self.format} need {needed} bytes, got {given}"
            )

    @classmethod
    def from_array(cls, array: np.ndarray[Any, Any], format: PixelFormat | None = None) -> RawFrame:
        """A uint8 array of shape (height, width) or (height, width, channels).

        Without `format` one channel is mono8, three are rgb8 and four rgba8. An OpenCV image is
        "bgr8", or "bgra8". "nv12" has the shape (height * 3 / 2, width) and "yuyv" (height, width,
        2). Raises ValueError for another shape or type.
        """
        channels = array.shape[2] if array.ndim == 3 else 1
        if array.dtype.name != "uint8" or array.ndim not in (2, 3):
            raise ValueError(f"need a uint8 array of 2 or 3 axes, got {array.dtype} {array.shape}")
        name = format or FORMAT_OF_CHANNELS.get(channels)
        if name is None or array.size == 0:
            raise ValueError(f"need a non-empty array of 1, 3 or 4 channels, got {array.shape}")
        if name in _FORMATS and _FORMATS[name][1] != channels:
            raise ValueError(f"{name} needs {_FORMATS[name][1]} channels, got {array.shape}")
        rows, width = array.shape[:2]
        whole = array if array.flags.c_contiguous else array.copy(order="C")
        return cls(whole, width, rows * 2 // 3 if name == "nv12" else rows, name)

    def to_image(self) -> media_pb2.Image:
        """The protobuf image."""
        image = media_pb2.Image()
        image.raw.layout.CopyFrom(self.layout)
        image.raw.data = self.data if isinstance(self.data, bytes) else bytes(self.view)
        return image

    @property
    def layout(self) -> media_pb2.PixelLayout:
        """The protobuf shape."""
        return media_pb2.PixelLayout(
            width=self.width,
            height=self.height,
            row_stride_bytes=self.row_bytes,
            format=_FORMATS[self.format][0],
        )

    @property
    def view(self) -> memoryview:
        """The bytes, not copied."""
        return _view(self.data).cast("B")

    @property
    def row_bytes(self) -> int:
        """Bytes from row to row."""
        return self.stride or self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self.width * _FORMATS[self.format][1]

    @property
    def _least_bytes(self) -> int:
        """The last row need not be padded."""
        rows = self.height * 3 // 2 if self.format == "nv12" else self.height
        return (rows - 1) * self.row_bytes + self._row_bytes


def _view(pixels: Any) -> memoryview:  # an array is a buffer to Python, not yet to type checkers
    return memoryview(pixels)
