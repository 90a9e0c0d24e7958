"""Decoding of image files to 8-bit RGB as an image viewer shows them.

- EXIF orientation is applied; a broken block counts as 1;
- ICC profiles are ignored;
- alpha is composited on white. Moondream's own code drops it, so that the model sees colours that
  no viewer shows; answers are about the image that its sender sees;
- 16-bit samples keep their high byte;
- of an animation the first frame is used.

Shape legend: H and W pixels, C channels. Arrays may be read-only.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable

import numpy as np
import simplejpeg
from PIL import Image

from legato_engine.errors import ImageUndecodable, LegatoError
from legato_engine.images.headers import ImageHeader, check_scans, inspect, orientation
from legato_engine.images.memory import Allocate, Pixels, new_pixels
from legato_engine.types import RawImage

Image.MAX_IMAGE_PIXELS = None  # `inspect` is given the limit

_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
DecodeJpeg = Callable[[bytes | memoryview, Pixels], bool]
"""Decodes a JPEG into an array [H, W, C] of its size; returns False for one that may be corrupt."""

_WHITE = 255
_PNG_DEPTH = 24  # the offset of the bits of a sample
_LIBJPEG_MODES = ("RGB", "L")
_PILLOW_FORMATS = {"image/jpeg": "JPEG", "image/png": "PNG", "image/webp": "WEBP"}


def decode_by_libjpeg(data: bytes | memoryview, pixels_HWC: Pixels) -> bool:
    """Decode to the same pixels as Pillow, without its copies; return False if libjpeg warns.

    The buffer has the size of the checked header, so a file that changes in the meantime cannot
    overrun it.
    """
    try:
        decoded_HWC = simplejpeg.decode_jpeg(data, "RGB", buffer=pixels_HWC, strict=True)
    except ValueError:
        return False
    return decoded_HWC.shape == pixels_HWC.shape


def decode_baseline(
    data: bytes | memoryview,
    header: ImageHeader,
    allocate: Allocate = new_pixels,
    decode_jpeg: DecodeJpeg = decode_by_libjpeg,
) -> Pixels | None:
    """Decode a JPEG with `is_baseline` to the displayed pixels [H, W, C], in memory of `allocate`.

    Return None if `decode_jpeg` fails: `decode_file` decides whether the image is corrupt.
    """
    pixels_HWC = allocate((header.height, header.width, 3))
    if not decode_jpeg(data, pixels_HWC):
        return None
    return _orient(pixels_HWC, orientation(data, header))


def decode_file(
    data: bytes | memoryview,
    header: ImageHeader,
    allocate: Allocate = new_pixels,
    *,
    max_pixels: int,
) -> Pixels:
    """Return the displayed pixels [H, W, C]; an upright JPEG's are in memory of `allocate`.

    The time is predictable only for a JPEG with `is_baseline`.

    Raises:
        ImageUndecodable: the file is corrupt, or contradicts `header`.
        ImageTooLarge: it has too many scans.
    """
    try:
        if header.is_baseline:
            pixels_HWC = decode_baseline(data, header, allocate)
            if pixels_HWC is not None:
                return pixels_HWC
        check_scans(data, header, max_pixels)
        image = Image.open(io.BytesIO(data), formats=[_PILLOW_FORMATS[header.mime_type]])
        if image.size != (header.width, header.height):
            raise ImageUndecodable("the image contradicts its own header", field="image")
        by_libjpeg = header.mime_type == "image/jpeg" and image.mode in _LIBJPEG_MODES
        pixels_HWC = allocate((header.height, header.width, 3)) if by_libjpeg else None
        # A missing bit and half an image raise the same warning.
        if pixels_HWC is None or not decode_by_libjpeg(data, pixels_HWC):
            image.load()
            if _is_png_of_16_bits(data, header) and image.mode == "RGB":
                # Pillow kept 8 bits of each sample: comparing them would hide other colours, too.
                image.info.pop("transparency", None)
            pixels_HWC = np.asarray(_to_rgb(image))
        return _orient(pixels_HWC, orientation(data, header))
    except (LegatoError, MemoryError):
        raise
    except Exception as error:  # decoders raise whatever corrupt bytes trip
        raise ImageUndecodable("the image is truncated or corrupt", field="image") from error


def decode_encoded(
    data: bytes | memoryview, *, max_pixels: int, allocate: Allocate = new_pixels
) -> Pixels:
    """Decode a file; raise as `inspect` and `decode_file`."""
    header = inspect(data, max_pixels=max_pixels, max_bytes=len(data))
    return decode_file(data, header, allocate, max_pixels=max_pixels)


def content_key(data: bytes | memoryview, raw: RawImage | None = None) -> str:
    """Return the hex SHA-256 of the bytes, preceded by the layout of raw pixels."""
    digest = hashlib.sha256()
    if raw is not None:
        digest.update(f"{raw.format}:{raw.width}x{raw.height}:{raw.row_stride}\n".encode())
    digest.update(data)
    return digest.hexdigest()


def image_id(key: str) -> str:
    return "img_" + key[:32]


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert to 8-bit RGB. `legato_client._images.sources.upright` must give the same pixels."""
    if image.mode.startswith("I"):
        samples_HW = np.asarray(image).clip(0, 0xFFFF)
        grey_HW = (samples_HW >> 8).astype(np.uint8)
        grey_HW[samples_HW == image.info.get("transparency", -1)] = _WHITE
        return Image.fromarray(grey_HW).convert("RGB")
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    image = image if image.mode == "RGBA" else image.convert("RGBA")
    shown = Image.new("RGB", image.size, (_WHITE,) * 3)
    shown.paste(image, mask=image)
    return shown


def _is_png_of_16_bits(data: bytes | memoryview, header: ImageHeader) -> bool:
    return header.mime_type == "image/png" and data[_PNG_DEPTH] == 16


def _orient(pixels_HWC: Pixels, turn: int) -> Pixels:
    method = _TRANSPOSE.get(turn)
    if method is None:
        return pixels_HWC
    return np.asarray(Image.fromarray(pixels_HWC).transpose(method))
