"""Image files become pixels: header checks, decoding, orientation, RGB.

What comes out is always the picture as a viewer would show it, 8-bit RGB:
- EXIF orientation 1-8 is applied; a broken EXIF block counts as orientation 1;
- grey is replicated, palettes are looked up, CMYK is converted, ICC profiles are ignored;
- alpha is dropped, not composited;
- 16-bit samples keep their high byte;
- of an animated WebP or PNG the first frame is used.

Pixels are uint8 RGB arrays, shape legend: H and W pixels, C channels. They may be read-only.
"""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import simplejpeg
from PIL import Image

from legato_engine.core import RawImage
from legato_engine.errors import ImageTooLarge, ImageUndecodable
from legato_engine.images.pixel_memory import Pixels, Take, new_pixels

_EXIF_ORIENTATION = 0x0112
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)  # orientations that swap width and height
_FLAT_JPEG_MODES = ("RGB", "L")  # the colour spaces that libjpeg itself brings to RGB
_APP1 = 0xE1  # EXIF or XMP
_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ALONE = frozenset((0x01, *range(0xD0, 0xD8), 0xFF))
_PIXELS_OR_END = (0xD9, 0xDA)
_PILLOW_FORMATS = {"image/jpeg": "JPEG", "image/png": "PNG", "image/webp": "WEBP"}


class ImageHeader(NamedTuple):
    """What an encoded picture says of itself; `width` and `height` are before orientation."""

    mime_type: str
    width: int
    height: int


def inspect(data: bytes | memoryview, *, max_pixels: int, max_bytes: int) -> ImageHeader:
    """Read type and size from the header alone; nothing is decoded or allocated.

    Raises `ImageTooLarge` (metadata `limit`, `actual`, `unit`) or `ImageUndecodable`.
    """
    if len(data) > max_bytes:
        raise _too_large(len(data), max_bytes, "bytes")
    try:
        header = _parse(data)
    except (struct.error, IndexError):
        raise ImageUndecodable("the image header is cut short", field="image") from None
    if header.width < 1 or header.height < 1:
        raise ImageUndecodable("the image has no pixels", field="image")
    if header.width * header.height > max_pixels:
        raise _too_large(header.width * header.height, max_pixels, "pixels")
    return header


def decode_encoded(data: bytes | memoryview, *, max_pixels: int, take: Take = new_pixels) -> Pixels:
    """[H, W, C] of the displayed picture of a JPEG, PNG or WebP file; `take` gives a JPEG room.

    Raises `ImageUndecodable`, or `ImageTooLarge` before anything is decoded.
    """
    header = inspect(data, max_pixels=max_pixels, max_bytes=len(data))
    is_jpeg = header.mime_type == "image/jpeg"
    try:
        if is_jpeg and _says_nothing_else(data):
            pixels_HWC = _decode_jpeg(data, header, take)
            if pixels_HWC is not None:
                return pixels_HWC
        image = Image.open(io.BytesIO(data), formats=[_PILLOW_FORMATS[header.mime_type]])
        if image.size != (header.width, header.height):
            raise ImageUndecodable("the image contradicts its own header", field="image")
        is_flat = is_jpeg and image.mode in _FLAT_JPEG_MODES
        pixels_HWC = _decode_jpeg(data, header, take) if is_flat else None
        if pixels_HWC is None:
            image.load()
            pixels_HWC = np.asarray(_to_rgb(image))
        return _orient(pixels_HWC, image)
    except (ImageUndecodable, MemoryError):
        raise
    except Exception as error:  # decoders raise whatever the corrupt bytes trip
        raise ImageUndecodable("the image is truncated or corrupt", field="image") from error


def displayed_size(data: bytes | memoryview, *, max_pixels: int) -> tuple[int, int]:
    """Width and height of the displayed picture; no pixel is decoded.

    Raises `ImageUndecodable` or `ImageTooLarge`.
    """
    header = inspect(data, max_pixels=max_pixels, max_bytes=len(data))
    try:
        image = Image.open(io.BytesIO(data), formats=[_PILLOW_FORMATS[header.mime_type]])
    except Exception as error:  # parsers raise whatever the corrupt bytes trip
        raise ImageUndecodable("the image is truncated or corrupt", field="image") from error
    width, height = image.size
    return (height, width) if _orientation(image) in _SIDEWAYS else (width, height)


def content_key(data: bytes | memoryview, raw: RawImage | None = None) -> str:
    """SHA-256 hex of the bytes; of raw pixels, of their layout and the bytes."""
    digest = hashlib.sha256()
    if raw is not None:
        digest.update(f"{raw.format}:{raw.width}x{raw.height}:{raw.row_stride}\n".encode())
    digest.update(data)
    return digest.hexdigest()


def image_id(key: str) -> str:
    """How a client names the picture with this content key."""
    return "img_" + key[:32]


def _too_large(actual: int, limit: int, unit: str) -> ImageTooLarge:
    return ImageTooLarge(
        f"the image has {actual} {unit}, the limit is {limit}",
        field="image",
        limit=limit,
        actual=actual,
        unit=unit,
    )


def _parse(data: bytes | memoryview) -> ImageHeader:
    head = bytes(data[:16])
    if head.startswith(b"\xff\xd8\xff"):
        return ImageHeader("image/jpeg", *_jpeg_size(data))
    if head.startswith(b"\x89PNG\r\n\x1a\n") and head[12:] == b"IHDR":
        return ImageHeader("image/png", *struct.unpack_from(">II", data, 16))
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return ImageHeader("image/webp", *_webp_size(data))
    raise ImageUndecodable("not a JPEG, PNG or WebP image", field="image")


def _jpeg_size(data: bytes | memoryview) -> tuple[int, int]:
    """Width and height of the first frame header (SOF)."""
    for marker, start in _jpeg_segments(data):
        if marker in _FRAME_HEADERS:
            height, width = struct.unpack_from(">HH", data, start + 1)
            return width, height
    raise ImageUndecodable("JPEG without a frame header", field="image")


def _says_nothing_else(data: bytes | memoryview) -> bool:
    """Whether a JPEG is grey or of three channels and brings neither EXIF nor XMP.

    Then Pillow has nothing to decide, and opening it costs a lone picture 0.3 ms.
    """
    channels = 0
    try:
        for marker, start in _jpeg_segments(data):
            if marker == _APP1:
                return False
            if marker in _FRAME_HEADERS:
                channels = data[start + 5]
    except (ImageUndecodable, IndexError, struct.error):
        return False  # Pillow forgives some
    return channels in (1, 3)


def _jpeg_segments(data: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """Markers and where their content begins, up to the pixels; reads no entropy.

    Raises `ImageUndecodable` or `IndexError`.
    """
    at = 2
    while True:
        if data[at] != 0xFF:
            raise ImageUndecodable("broken JPEG segment", field="image")
        marker = data[at + 1]
        if marker in _ALONE:
            at += 1 if marker == 0xFF else 2  # fill byte, or a marker without a segment
            continue
        if marker in _PIXELS_OR_END:
            return
        length = data[at + 2] << 8 | data[at + 3]
        yield marker, at + 4
        at += 2 + max(length, 2)


def _webp_size(data: bytes | memoryview) -> tuple[int, int]:
    """Canvas size by the kind of the first chunk: extended, lossless or lossy."""
    kind = bytes(data[12:16])
    if kind == b"VP8X":
        low_w, high_w, low_h, high_h = struct.unpack_from("<HBHB", data, 24)
        return (low_w | high_w << 16) + 1, (low_h | high_h << 16) + 1
    if kind == b"VP8L" and data[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 " and bytes(data[23:26]) == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise ImageUndecodable("broken WebP header", field="image")


def _to_rgb(image: Image.Image) -> Image.Image:
    """Mode RGB; 16-bit grey is cut to its high byte, as Pillow does for 16-bit colour."""
    image.info.pop("transparency", None)  # dropped like alpha, and never a colour to match
    if image.mode.startswith("I"):
        samples_HW = np.asarray(image).astype(np.int64).clip(0, 0xFFFF) >> 8
        image = Image.fromarray(samples_HW.astype(np.uint8))
    return image if image.mode == "RGB" else image.convert("RGB")


def _decode_jpeg(data: bytes | memoryview, header: ImageHeader, take: Take) -> Pixels | None:
    """Pillow's own pixels without its copies; None where Pillow has to decide.

    That is for files that make libjpeg complain: some of them Pillow shows, the truncated ones it
    refuses. The buffer has the size of the checked header, so a file cannot grow while it is
    decoded.
    """
    pixels_HWC = take((header.height, header.width, 3))
    try:
        decoded_HWC = simplejpeg.decode_jpeg(data, "RGB", buffer=pixels_HWC, strict=True)
    except ValueError:
        return None
    return pixels_HWC if decoded_HWC.shape == pixels_HWC.shape else None


def _orientation(source: Image.Image) -> int:
    try:
        orientation: int = source.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 - a broken EXIF block must not lose a good picture
        return 1
    return orientation


def _orient(pixels_HWC: Pixels, source: Image.Image) -> Pixels:
    method = _TRANSPOSE.get(_orientation(source))
    if method is None:
        return pixels_HWC
    return np.asarray(Image.fromarray(pixels_HWC).transpose(method))
