"""Any image as a Pillow image. Needs Pillow."""

from __future__ import annotations

import io
import os
from typing import Any

from PIL import Image

from legato_client._images.sources import CachedImage, ImageInput, RawFrame, SharedFrame, upright

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
    """Return the RGB pixels that a model sees of an image.

    Raises:
        OSError: The file cannot be read.
        TypeError: Only the server has the pixels.
        ValueError: The array or Pillow image is of a type that `to_image` refuses.
    """
    if isinstance(image, CachedImage | SharedFrame):
        raise TypeError("only the server has the pixels of a cached or shared image")
    source: Any = image
    if isinstance(image, bytes | bytearray):
        source = Image.open(io.BytesIO(image))
    elif isinstance(image, str | os.PathLike):
        source = Image.open(image)
    elif not isinstance(image, Image.Image):
        frame = image if isinstance(image, RawFrame) else RawFrame.from_array(source)
        return _from_frame(frame).convert("RGB")
    return upright(source).convert("RGB")


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
    """Pad the last row, as Pillow reads one as long as the others."""
    return data + bytes(-len(data) % stride)
