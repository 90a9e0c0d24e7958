"""Raw pixels."""

from __future__ import annotations

import dataclasses

from legato.v1 import media_pb2
from legato_engine.core.images import PixelFormat
from legato_engine.errors import ImageTooLarge, ImageUndecodable, InvalidField
from legato_engine.images import raw

_FORMATS = {
    media_pb2.PIXEL_FORMAT_RGB8: PixelFormat.RGB8,
    media_pb2.PIXEL_FORMAT_BGR8: PixelFormat.BGR8,
    media_pb2.PIXEL_FORMAT_RGBA8: PixelFormat.RGBA8,
    media_pb2.PIXEL_FORMAT_BGRA8: PixelFormat.BGRA8,
    media_pb2.PIXEL_FORMAT_MONO8: PixelFormat.MONO8,
    media_pb2.PIXEL_FORMAT_NV12: PixelFormat.NV12,
    media_pb2.PIXEL_FORMAT_YUYV: PixelFormat.YUYV,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The shape of raw pixels."""

    width: int
    height: int
    row_stride: int
    format: PixelFormat

    @property
    def num_bytes(self) -> int:
        return raw.num_bytes(self.format, self.width, self.height, self.row_stride)


def read_layout(message: media_pb2.PixelLayout, field: str) -> Layout:
    if message.format not in _FORMATS:
        known = ", ".join(pixel_format.name for pixel_format in PixelFormat)
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
    if actual > limit:
        raise ImageTooLarge(
            f"the image has {actual} {unit}, the limit is {limit}",
            field=field,
            limit=limit,
            actual=actual,
            unit=unit,
        )


def check_complete(layout: Layout, actual: int, field: str) -> None:
    if actual < layout.num_bytes:
        raise ImageUndecodable(
            f"{layout.num_bytes} bytes needed, {actual} given",
            field=field,
            limit=layout.num_bytes,
            actual=actual,
        )
