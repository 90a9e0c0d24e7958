"""Image files: header checks, and decoding to RGB as displayed.

The result is 8-bit RGB, as an image viewer shows the file:
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
from legato_engine.images.pixel_memory import Allocate, Pixels, new_pixels

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
_LIBJPEG_MODES = ("RGB", "L")  # colour spaces that libjpeg converts to RGB
_APP1 = 0xE1  # EXIF or XMP
_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xD8), 0xFF))
_PIXELS_OR_END = (0xD9, 0xDA)
_PILLOW_FORMATS = {"image/jpeg": "JPEG", "image/png": "PNG", "image/webp": "WEBP"}


class ImageHeader(NamedTuple):
    """Type and size of an image file, before orientation.

    A plain JPEG is grey or of three channels and has neither EXIF nor XMP.
    """

    mime_type: str
    width: int
    height: int
    is_plain_jpeg: bool = False


def inspect(data: bytes | memoryview, *, max_pixels: int, max_bytes: int) -> ImageHeader:
    """Read and check the header without decoding or allocating anything.

    Raises:
        ImageTooLarge: over `max_pixels` or `max_bytes`; metadata `limit`, `actual`, `unit`.
        ImageUndecodable: not a JPEG, PNG or WebP file, or a broken header.
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


def decode_file(
    data: bytes | memoryview, header: ImageHeader, allocate: Allocate = new_pixels
) -> Pixels:
    """Return the displayed pixels [H, W, C]; `header` is from `inspect`.

    `allocate` provides the memory of a JPEG's pixels.

    Raises:
        ImageUndecodable: the file is truncated or corrupt, or contradicts `header`.
    """
    try:
        if header.is_plain_jpeg:
            pixels_HWC = _decode_jpeg(data, header, allocate)
            if pixels_HWC is not None:
                return pixels_HWC
        image = Image.open(io.BytesIO(data), formats=[_PILLOW_FORMATS[header.mime_type]])
        if image.size != (header.width, header.height):
            raise ImageUndecodable("the image contradicts its own header", field="image")
        by_libjpeg = header.mime_type == "image/jpeg" and image.mode in _LIBJPEG_MODES
        pixels_HWC = _decode_jpeg(data, header, allocate) if by_libjpeg else None
        if pixels_HWC is None:
            image.load()
            pixels_HWC = np.asarray(_to_rgb(image))
        return _orient(pixels_HWC, image)
    except (ImageUndecodable, MemoryError):
        raise
    except Exception as error:  # decoders raise whatever the corrupt bytes trip
        raise ImageUndecodable("the image is truncated or corrupt", field="image") from error


def decode_encoded(
    data: bytes | memoryview, *, max_pixels: int, allocate: Allocate = new_pixels
) -> Pixels:
    """Read the header of a file and decode it. Raises as `inspect` and `decode_file`."""
    header = inspect(data, max_pixels=max_pixels, max_bytes=len(data))
    return decode_file(data, header, allocate)


def displayed_size(data: bytes | memoryview, *, max_pixels: int) -> tuple[int, int]:
    """Return the displayed width and height. Raises as `inspect`."""
    header = inspect(data, max_pixels=max_pixels, max_bytes=len(data))
    try:
        image = Image.open(io.BytesIO(data), formats=[_PILLOW_FORMATS[header.mime_type]])
    except Exception as error:  # parsers raise whatever the corrupt bytes trip
        raise ImageUndecodable("the image is truncated or corrupt", field="image") from error
    width, height = image.size
    return (height, width) if _orientation(image) in _SIDEWAYS else (width, height)


def content_key(data: bytes | memoryview, raw: RawImage | None = None) -> str:
    """Return the SHA-256 in hex of the bytes, after the layout of raw pixels."""
    digest = hashlib.sha256()
    if raw is not None:
        digest.update(f"{raw.format}:{raw.width}x{raw.height}:{raw.row_stride}\n".encode())
    digest.update(data)
    return digest.hexdigest()


def image_id(key: str) -> str:
    """Return the id for clients of a content key."""
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
        return _parse_jpeg(data)
    if head.startswith(b"\x89PNG\r\n\x1a\n") and head[12:] == b"IHDR":
        return ImageHeader("image/png", *struct.unpack_from(">II", data, 16))
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return ImageHeader("image/webp", *_webp_size(data))
    raise ImageUndecodable("not a JPEG, PNG or WebP image", field="image")


def _parse_jpeg(data: bytes | memoryview) -> ImageHeader:
    segments = _jpeg_segments(data)
    has_metadata = False
    for marker, start in segments:
        has_metadata = has_metadata or marker == _APP1
        if marker in _FRAME_HEADERS:
            height, width = struct.unpack_from(">HH", data, start + 1)
            is_plain = not has_metadata and _is_plain(data, start, segments)
            return ImageHeader("image/jpeg", width, height, is_plain)
    raise ImageUndecodable("JPEG without a frame header", field="image")


def _is_plain(data: bytes | memoryview, frame: int, rest: Iterator[tuple[int, int]]) -> bool:
    """Return whether a JPEG needs no Pillow, which takes 0.3 ms to open it.

    `frame` is the offset of the first frame header, `rest` are the segments after it.
    """
    try:
        channels = data[frame + 5]
        for marker, start in rest:
            if marker == _APP1:
                return False
            if marker in _FRAME_HEADERS:
                channels = data[start + 5]
    except (ImageUndecodable, IndexError):
        return False  # Pillow accepts some broken segments
    return channels in (1, 3)


def _jpeg_segments(data: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """Yield each marker and the start of its content, up to the entropy-coded data."""
    at = 2
    while True:
        if data[at] != 0xFF:
            raise ImageUndecodable("broken JPEG segment", field="image")
        marker = data[at + 1]
        if marker in _WITHOUT_LENGTH:
            at += 1 if marker == 0xFF else 2  # fill byte, or a marker without a segment
            continue
        if marker in _PIXELS_OR_END:
            return
        length = data[at + 2] << 8 | data[at + 3]
        yield marker, at + 4
        at += 2 + max(length, 2)


def _webp_size(data: bytes | memoryview) -> tuple[int, int]:
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
    """Convert to RGB; 16-bit grey keeps its high byte, as in Pillow's 16-bit colour."""
    image.info.pop("transparency", None)  # else Pillow matches it as a colour
    if image.mode.startswith("I"):
        samples_HW = np.asarray(image).astype(np.int64).clip(0, 0xFFFF) >> 8
        image = Image.fromarray(samples_HW.astype(np.uint8))
    return image if image.mode == "RGB" else image.convert("RGB")


def _decode_jpeg(
    data: bytes | memoryview, header: ImageHeader, allocate: Allocate
) -> Pixels | None:
    """Decode to the same pixels as Pillow, without its copies; return None if libjpeg warns.

    Pillow then decides: it shows some of these files and refuses truncated ones. The buffer has the
    size of the checked header, so a file that changes in the meantime cannot overrun it.
    """
    pixels_HWC = allocate((header.height, header.width, 3))
    try:
        decoded_HWC = simplejpeg.decode_jpeg(data, "RGB", buffer=pixels_HWC, strict=True)
    except ValueError:
        return None
    return pixels_HWC if decoded_HWC.shape == pixels_HWC.shape else None


def _orientation(source: Image.Image) -> int:
    try:
        orientation: int = source.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 - a broken EXIF block must not lose a good image
        return 1
    return orientation


def _orient(pixels_HWC: Pixels, source: Image.Image) -> Pixels:
    method = _TRANSPOSE.get(_orientation(source))
    if method is None:
        return pixels_HWC
    return np.asarray(Image.fromarray(pixels_HWC).transpose(method))
