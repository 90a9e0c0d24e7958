"""The shape of raw pixels, from the contract's message."""

from __future__ import annotations

import dataclasses

from legato.v1 import media_pb2
from legato_engine import core
from legato_engine.errors import ImageTooLarge, ImageUndecodable, InvalidField
from legato_engine.images import raw

_FORMATS = {
    media_pb2.PIXEL_FORMAT_RGB8: core.PixelFormat.RGB8,
    media_pb2.PIXEL_FORMAT_BGR8: core.PixelFormat.BGR8,
    media_pb2.PIXEL_FORMAT_RGBA8: core.PixelFormat.RGBA8,
    media_pb2.PIXEL_FORMAT_BGRA8: core.PixelFormat.BGRA8,
    media_pb2.PIXEL_FORMAT_MONO8: core.PixelFormat.MONO8,
    media_pb2.PIXEL_FORMAT_NV12: core.PixelFormat.NV12,
    media_pb2.PIXEL_FORMAT_YUYV: core.PixelFormat.YUYV,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The shape of raw pixels, checked."""

    width: int
    height: int
    row_stride: int
    format: core.PixelFormat

    @property
    def num_bytes(self) -> int:
        """The least size of an image of this layout."""
        return raw.num_bytes(self.format, self.width, self.height, self.row_stride)


def read_layout(message: media_pb2.PixelLayout, field: str) -> Layout:
    """Check the layout in the request's `field`.

    Raises:
        InvalidField: the format is not known, or sizes are impossible.
    """
    if message.format not in _FORMATS:
        known = ", ".join(pixel_format.name for pixel_format in core.PixelFormat)
        raise InvalidField(f"must be one of {known}", field=f"{field}.format")
    pixel_format = _FORMATS[message.format]
    stride = message.row_stride_bytes or raw.row_bytes(pixel_format, message.width)
    try:
        raw.check_layout(pixel_format, message.width, message.height, stride)
    except InvalidField as error:
        error.metadata["field"] = f"{field}.{error.metadata['field']}"
        raise
    return Layout(message.width, message.height, stride, pixel_format)


def check_size(actual: int, limit: int, unit: str, field: str) -> None:
    """Check a number of pixels or bytes.

    Raises:
        ImageTooLarge: it is above the limit.
    """
    if actual > limit:
        raise ImageTooLarge(
            f"the image has {actual} {unit}, the limit is {limit}",
            field=field,
            limit=limit,
            actual=actual,
            unit=unit,
        )


def check_complete(layout: Layout, actual: int, field: str) -> None:
    """Check that there are as many bytes as the layout needs.

    Raises:
        ImageUndecodable: there are fewer.
    """
    if actual < layout.num_bytes:
        raise ImageUndecodable(
            f"{layout.num_bytes} bytes needed, {actual} given",
            field=field,
            limit=layout.num_bytes,
            actual=actual,
        )
