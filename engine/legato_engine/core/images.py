"""Images of requests: where their bytes are, and what is known of them once they were read."""

from __future__ import annotations

import enum

from legato_engine.core.value import Value


class PixelFormat(enum.StrEnum):
    """Layouts of raw pixels."""

    RGB8 = "rgb8"
    BGR8 = "bgr8"
    RGBA8 = "rgba8"
    BGRA8 = "bgra8"
    MONO8 = "mono8"
    NV12 = "nv12"
    YUYV = "yuyv"


class BlobRef(Value, frozen=True):
    """A file in shared memory, of which `size` bytes are valid.

    Generation 0 is a file of its own, any other a reused segment (`segment_pool`).
    """

    name: str
    size: int
    generation: int = 0


class EncodedImage(Value, frozen=True):
    """An image file in a blob; `mime_type` is detected from its bytes."""

    blob: BlobRef
    mime_type: str


class RawImage(Value, frozen=True):
    """Pixels in a blob; `row_stride` is in bytes."""

    blob: BlobRef
    width: int
    height: int
    row_stride: int
    format: PixelFormat


class CachedImage(Value, frozen=True):
    """An image in the engine, by id."""

    image_id: str


ImageSource = EncodedImage | RawImage | CachedImage
WITH_BLOB = (EncodedImage, RawImage)  # kinds that own a blob


class ImageInfo(Value, frozen=True):
    """An image; its size is after EXIF orientation."""

    image_id: str
    width: int
    height: int
    cache_hit: bool
