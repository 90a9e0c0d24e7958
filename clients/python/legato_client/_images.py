"""Pictures in every shape a caller may hold, as protobuf.

Pillow and numpy are never imported here: an object of theirs can only be passed by a program that
imported them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from legato.v1 import media_pb2

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image as PILImage


@dataclasses.dataclass(frozen=True, slots=True)
class CachedImage:
    """A picture the server has seen, by the `image_id` of an earlier answer."""

    image_id: str


ImageInput: TypeAlias = (
    "str | os.PathLike[str] | bytes | bytearray | CachedImage"
    " | PILImage.Image | np.ndarray[Any, Any]"
)

_FORMAT_OF_CHANNELS = {
    1: media_pb2.PIXEL_FORMAT_MONO8,
    3: media_pb2.PIXEL_FORMAT_RGB8,
    4: media_pb2.PIXEL_FORMAT_RGBA8,
}


def to_image(image: ImageInput) -> media_pb2.Image:
    """The protobuf picture.

    A string or path names a file, bytes are a JPEG, PNG or WebP file, an array is uint8 of shape
    (height, width), (height, width, 3) RGB or (height, width, 4) RGBA, and a Pillow picture is
    turned upright by its EXIF orientation and sent losslessly. Raises OSError for an unreadable
    file, ValueError for an array of another shape or type, TypeError for anything else.
    """
    if isinstance(image, CachedImage):
        return media_pb2.Image(image_id=image.image_id)
    if isinstance(image, bytes | bytearray):
        return _encoded(bytes(image))
    if isinstance(image, str | os.PathLike):
        return _encoded(Path(image).read_bytes())
    array_or_picture: Any = image  # its class is looked up by name, which narrows nothing
    if _is_instance(image, "numpy", "ndarray"):
        return _from_array(array_or_picture)
    if _is_instance(image, "PIL.Image", "Image"):
        return _encoded(_png(array_or_picture))
    raise TypeError(f"not a picture: {type(image).__name__}")


async def to_image_async(image: ImageInput) -> media_pb2.Image:
    """`to_image`, on a worker thread for what has to be read, copied or encoded there."""
    if isinstance(image, CachedImage | bytes):
        return to_image(image)
    return await asyncio.to_thread(to_image, image)


def _is_instance(value: object, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def _encoded(data: bytes) -> media_pb2.Image:
    # The server sniffs the type; a wrong claim would be an error, an absent one is not.
    image = media_pb2.Image()  # filled in place: a message given to a constructor is copied slowly
    image.encoded.data = data
    return image


def _from_array(array: np.ndarray[Any, Any]) -> media_pb2.Image:
    channels = array.shape[2] if array.ndim == 3 else 1
    if array.dtype.name != "uint8" or array.ndim not in (2, 3):
        raise ValueError(f"need a uint8 array of 2 or 3 axes, got {array.dtype} {array.shape}")
    if channels not in _FORMAT_OF_CHANNELS or array.size == 0:
        raise ValueError(f"need a non-empty array of 1, 3 or 4 channels, got {array.shape}")
    height, width = array.shape[:2]
    image = media_pb2.Image()
    image.raw.layout.width = width
    image.raw.layout.height = height
    image.raw.layout.row_stride_bytes = width * channels
    image.raw.layout.format = _FORMAT_OF_CHANNELS[channels]
    image.raw.data = array.tobytes()
    return image


def _png(image: PILImage.Image) -> bytes:
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)
    if upright.mode not in ("L", "RGB", "RGBA"):
        upright = upright.convert("RGB")
    buffer = io.BytesIO()
    upright.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
