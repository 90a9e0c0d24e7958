"""Images in every shape a caller may hold, as protobuf.

Pillow and numpy are never imported here: an object of theirs can only be passed by a program that
imported them.
"""

from __future__ import annotations

import dataclasses
import datetime
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from legato.v1 import media_pb2

from legato_client._images.raw_frame import RawFrame
from legato_client._images.shared_frames import SharedFrame

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image as PILImage


@dataclasses.dataclass(frozen=True, slots=True)
class CachedImage:
    """An image the server has seen, by the `image_id` of an earlier answer."""

    image_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class HeldImage(CachedImage):
    """An image uploaded by `put_image`: its size in pixels, and when the server forgets it.

    The server may forget it earlier if its memory runs short.
    """

    width: int
    height: int
    expire_time: datetime.datetime | None = None


ImageInput: TypeAlias = (
    "str | os.PathLike[str] | bytes | bytearray | CachedImage | RawFrame | SharedFrame"
    " | PILImage.Image | np.ndarray[Any, Any]"
)


def to_image(image: ImageInput) -> media_pb2.Image:
    """Convert an image to protobuf.

    A string or path names a file, bytes are a JPEG, PNG or WebP file, an array is uint8 of shape
    (height, width), (height, width, 3) RGB or (height, width, 4) RGBA, and a Pillow image is
    turned upright by its EXIF orientation and sent losslessly. `RawFrame` is for pixels of other
    formats, and a `SharedFrame` lies in memory that the server reads itself.

    Raises:
        OSError: The file cannot be read.
        ValueError: The array has another shape or type.
        TypeError: `image` is none of these.
    """
    if isinstance(image, CachedImage):
        return media_pb2.Image(image_id=image.image_id)
    if isinstance(image, bytes | bytearray):
        return _encoded(bytes(image))
    if isinstance(image, str | os.PathLike):
        return _encoded(Path(image).read_bytes())
    if isinstance(image, RawFrame | SharedFrame):
        return image.to_image()
    array_or_image: Any = image  # its class is looked up by name, which narrows nothing
    if _is_instance(image, "numpy", "ndarray"):
        return RawFrame.from_array(array_or_image).to_image()
    if _is_instance(image, "PIL.Image", "Image"):
        return _encoded(_png(array_or_image))
    raise TypeError(f"not an image: {type(image).__name__}")


def is_ready(image: ImageInput) -> bool:
    """Whether `to_image` has nothing to read, copy or encode."""
    return isinstance(image, CachedImage | SharedFrame | bytes)


def _is_instance(value: object, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def _encoded(data: bytes) -> media_pb2.Image:
    # The server sniffs the type; a wrong claim would be an error, an absent one is not.
    image = media_pb2.Image()  # filled in place: a message given to a constructor is copied slowly
    image.encoded.data = data
    return image


def _png(image: PILImage.Image) -> bytes:
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)
    if upright.mode not in ("L", "RGB", "RGBA"):
        upright = upright.convert("RGB")
    buffer = io.BytesIO()
    upright.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
