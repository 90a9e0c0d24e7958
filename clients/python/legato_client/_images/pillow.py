"""Images for Pillow: whatever a caller may hold, opened for drawing on it. Needs Pillow."""

from __future__ import annotations

import io
import os
from typing import Any

from PIL import Image, ImageOps

from legato_client._images.raw_frame import RawFrame
from legato_client._images.shared_frames import SharedFrame
from legato_client._images.sources import CachedImage, ImageInput

_PACKED = {  # format: mode, and the order of its bytes in a row
    "rgb8": ("RGB", "RGB"),
    "bgr8": ("RGB", "BGR"),
    "rgba8": ("RGB", "RGBX"),
    "bgra8": ("RGB", "BGRX"),
    "mono8": ("L", "L"),
}
# Cameras give BT.601 in limited range (Y 16..235, U and V 16..240); Pillow's YCbCr is full range.
_LUMA = [min(255, max(0, round((value - 16) * 255 / 219))) for value in range(256)]
_CHROMA = [min(255, max(0, round((value - 128) * 255 / 224 + 128))) for value in range(256)]


def open_upright(image: ImageInput) -> Image.Image:
    """An upright RGB copy; TypeError for an image whose pixels only the server has."""
    if isinstance(image, CachedImage | SharedFrame):
        raise TypeError("only the server has the pixels of a cached or shared image")
    if isinstance(image, RawFrame):
        return _from_frame(image).convert("RGB")
    source: Any = image
    if isinstance(image, bytes | bytearray):
        source = Image.open(io.BytesIO(image))
    elif isinstance(image, str | os.PathLike):
        source = Image.open(image)
    elif not isinstance(image, Image.Image):
        source = Image.fromarray(source)
    return ImageOps.exif_transpose(source).convert("RGB")


def _from_frame(frame: RawFrame) -> Image.Image:
    data, stride = frame.to_image().raw.data, frame.row_bytes
    size = (frame.width, frame.height)
    if frame.format in _PACKED:
        mode, order = _PACKED[frame.format]
        return Image.frombytes(mode, size, _padded(data, stride), "raw", order, stride)
    half = (frame.width + 1) // 2
    if frame.format == "yuyv":
        luma = Image.frombytes("LA", size, _padded(data, stride), "raw", "LA", stride).getchannel(0)
        both = Image.frombytes(
            "RGBA", (half, frame.height), _padded(data, stride), "raw", "RGBA", stride
        )
        chroma = both.getchannel(1), both.getchannel(3)
    else:
        end = stride * frame.height
        luma = Image.frombytes("L", size, data[:end], "raw", "L", stride)
        rows = (frame.height + 1) // 2
        both = Image.frombytes("LA", (half, rows), _padded(data[end:], stride), "raw", "LA", stride)
        chroma = both.getchannel(0), both.getchannel(1)
    planes = [luma.point(_LUMA), *(plane.resize(size).point(_CHROMA) for plane in chroma)]
    return Image.merge("YCbCr", planes)


def _padded(data: bytes, stride: int) -> bytes:
    """The rows with the last one as long as the others, as Pillow reads them."""
    return data + bytes(-len(data) % stride)
