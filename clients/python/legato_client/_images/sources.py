"""Images of every type, as protobuf. Never imports Pillow or numpy."""

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

    A string or path names a file, and bytes are a JPEG, PNG or WebP file. Files and Pillow images
    are turned upright by their EXIF orientation and shown on white where they are transparent; 16
    bits become 8. A Pillow image is sent losslessly. An array is uint8 of shape (height, width),
    (height, width, 3) RGB or (height, width, 4) RGBA; alpha in arrays and frames is ignored.
    `RawFrame` is for pixels of other formats, and a `SharedFrame` lies in memory that the server
    reads itself.

    Raises:
        OSError: The file cannot be read.
        ValueError: The array has another shape or type, or the Pillow image has mode F.
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
    array_or_image: Any = image  # the lookup by name narrows nothing
    if _is_instance(image, "numpy", "ndarray"):
        return RawFrame.from_array(array_or_image).to_image()
    if _is_instance(image, "PIL.Image", "Image"):
        return _encoded(_png(array_or_image))
    raise TypeError(f"not an image: {type(image).__name__}")


def is_ready(image: ImageInput) -> bool:
    """`to_image` has nothing to read, copy or encode."""
    return isinstance(image, CachedImage | SharedFrame | bytes)


def _is_instance(value: object, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def _encoded(data: bytes) -> media_pb2.Image:
    # The server sniffs the type; a wrong claim would be an error.
    image = media_pb2.Image()  # in place: a message given to a constructor is copied slowly
    image.encoded.data = data
    return image


def _png(image: PILImage.Image) -> bytes:
    from legato_client._images.pillow import upright  # needs Pillow

    buffer = io.BytesIO()
    upright(image).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
