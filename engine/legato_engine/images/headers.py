"""Headers of image files: type, size, orientation, limits.

Only the tag itself is read, so that the size of a block and the number of its entries cost nothing.
A block that is broken or beyond the limits counts as absent.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from legato_engine.errors import ImageTooLarge, ImageUndecodable, LegatoError

UPRIGHT = 1
SIDEWAYS = (5, 6, 7, 8)
"""Orientations that swap width and height."""

_Bytes = bytes | memoryview
_TAG = 0x0112
_FORMATS = {1: "B", 3: "H", 4: "I"}  # of the tag's value, by TIFF type
_MAX_ENTRIES = 1024  # of a directory
_MAX_CHUNKS = 4096  # of a PNG or WebP: a walk of a millisecond
_MAX_TEXT = 1024 * 1024  # bytes of XMP, inflated
_EXIF_PREFIX = b"Exif\0\0"
_XMP_PREFIX = b"http://ns.adobe.com/xap/1.0/\0"
_XMP_KEYWORD = b"XML:com.adobe.xmp"
_PROFILE_KEYWORD = b"Raw profile type exif"  # EXIF in hexadecimal, by ImageMagick
_IN_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def orientation(data: _Bytes, header: ImageHeader) -> int:
    """Return the EXIF orientation, 1 to 8."""
    if not header.has_metadata:
        return UPRIGHT
    found = UPRIGHT
    try:
        for block, read in _BLOCKS[header.mime_type](memoryview(data)):
            value = read(block)
            if value is not None:
                found = value
                if read is _in_exif:
                    break
    except (LegatoError, struct.error, IndexError, ValueError, zlib.error):
        pass
    return found if UPRIGHT <= found <= SIDEWAYS[-1] else UPRIGHT


def displayed_size(data: _Bytes, header: ImageHeader) -> tuple[int, int]:
    """Return width and height after orientation."""
    if orientation(data, header) in SIDEWAYS:
        return header.height, header.width
    return header.width, header.height


_Block = tuple[_Bytes, Callable[[_Bytes], int | None]]


def _in_exif(block: _Bytes) -> int | None:
    """Read the tag of the first directory of a TIFF block."""
    if bytes(block[:6]) == _EXIF_PREFIX:
        block = block[6:]
    order = {b"II": "<", b"MM": ">"}.get(bytes(block[:2]))
    if order is None:
        return None
    (start,) = struct.unpack_from(f"{order}I", block, 4)
    (count,) = struct.unpack_from(f"{order}H", block, start)
    for index in range(min(count, _MAX_ENTRIES)):
        at = start + 2 + 12 * index
        tag, kind, values = struct.unpack_from(f"{order}HHI", block, at)
        if tag == _TAG and values == 1 and kind in _FORMATS:
            value: int = struct.unpack_from(order + _FORMATS[kind], block, at + 8)[0]
            return value
    return None


def _in_xmp(block: _Bytes) -> int | None:
    found = _IN_XMP.search(block, 0, _MAX_TEXT)
    return int(found[1]) if found else None


def _jpeg_blocks(data: memoryview) -> Iterator[_Block]:
    for marker, start in jpeg_segments(data):
        if marker != APP1:
            continue
        content = data[start : start - 2 + (data[start - 2] << 8 | data[start - 1])]
        if bytes(content[: len(_EXIF_PREFIX)]) == _EXIF_PREFIX:
            yield content, _in_exif
        elif bytes(content[: len(_XMP_PREFIX)]) == _XMP_PREFIX:
            yield content, _in_xmp


def _png_blocks(data: memoryview) -> Iterator[_Block]:
    at = 8
    for _ in range(_MAX_CHUNKS):
        size, kind = struct.unpack_from(">I4s", data, at)
        content = data[at + 8 : at + 8 + size]
        if kind == b"eXIf":
            yield content, _in_exif
        elif kind == b"iTXt" and (text := _international_text(content)):
            yield text, _in_xmp
        elif kind in (b"zTXt", b"tEXt") and (profile := _raw_profile(content, kind)):
            yield profile, _in_exif
        elif kind == b"IEND":
            return
        at += 12 + size


def _international_text(content: memoryview) -> bytes | None:
    if bytes(content[: len(_XMP_KEYWORD) + 1]) != _XMP_KEYWORD + b"\0":
        return None
    is_compressed = content[len(_XMP_KEYWORD) + 1]
    fields = bytes(content[len(_XMP_KEYWORD) + 3 : len(_XMP_KEYWORD) + 3 + _MAX_TEXT])
    text = fields.split(b"\0", 2)[2]  # after the language and the translated keyword
    return _inflated(text) if is_compressed else text


def _raw_profile(content: memoryview, kind: bytes) -> bytes | None:
    if bytes(content[: len(_PROFILE_KEYWORD) + 1]) != _PROFILE_KEYWORD + b"\0":
        return None
    text = bytes(content[len(_PROFILE_KEYWORD) + 1 :][:_MAX_TEXT])
    lines = (_inflated(text[1:]) if kind == b"zTXt" else text).split(b"\n")
    return bytes.fromhex(b"".join(lines[3:]).decode("ascii"))


def _inflated(data: bytes) -> bytes:
    return zlib.decompressobj().decompress(data, _MAX_TEXT)


def _webp_blocks(data: memoryview) -> Iterator[_Block]:
    at = 12
    for _ in range(_MAX_CHUNKS):
        kind, size = struct.unpack_from("<4sI", data, at)
        content = data[at + 8 : at + 8 + size]
        if kind == b"EXIF":
            yield content, _in_exif
        elif kind == b"XMP ":
            yield content, _in_xmp
        at += 8 + size + size % 2


_BLOCKS: dict[str, Callable[[memoryview], Iterator[_Block]]] = {
    "image/jpeg": _jpeg_blocks,
    "image/png": _png_blocks,
    "image/webp": _webp_blocks,
}


# ---------------------------------------------------------------- headers

# Every walk over a file is bounded, so a check takes at most two milliseconds.

MAX_SIDE = 65_535
"""Pixels of a side. No JPEG or WebP has more, and a decoder's work for a row of one pixel is that
for a row of hundreds."""

MAX_SEGMENTS = 1024
"""Segments and fill bytes of a JPEG before its first scan. Cameras write fewer than a hundred."""

MAX_CHUNKS = 8192
"""Chunks of a PNG. Encoders write pixels in chunks of 8 KB or more."""

MAX_SCANS = 64
"""Scans of a JPEG. Encoders write about 10, those that search for the smallest file 20."""

MAX_SCANNED = 16
"""Scans times pixels, in images of the most pixels."""

FREE_BYTES = 64 * 1024 * 1024
"""Decoded bytes that a file of any length may have: those of 22 million pixels, which any screen
and most cameras stay below, so that a flat image passes."""

MAX_RATIO = 1032
"""Decoded bytes for each byte of the file, beyond `FREE_BYTES`. No deflated data expand to more."""

APP1 = 0xE1  # EXIF or XMP
SOS = 0xDA  # start of a scan
_EOI = 0xD9
_BASELINE = (0xC0, 0xC1)
_PROGRESSIVE = 0xC2
_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xD8), 0xFF))
_AFTER_SCAN = re.compile(rb"\xff[\x02-\xcf\xd8-\xfe]")  # neither stuffing nor a restart
_SCANS_COST, _INFLATE_COST = 8, 2  # per pixel, of a baseline JPEG's
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_RGB = 3  # decoded bytes of a pixel
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type


class ImageHeader(NamedTuple):
    """Type and size of an image file, before orientation."""

    mime_type: str
    width: int
    height: int
    is_baseline: bool = False
    """A JPEG of one Huffman-coded scan, grey or of three channels: its decoding takes a time and
    memory in proportion to its pixels and bytes, whatever these are."""

    has_scans: bool = False
    """A JPEG that may have several scans, each of which may cost as much as the whole image."""

    has_metadata: bool = False
    """Whether EXIF or XMP may turn it."""

    @property
    def num_pixels(self) -> int:
        return self.width * self.height

    @property
    def cost(self) -> int:
        """Return the estimated pixels of a baseline JPEG that takes as long to decode."""
        if self.is_baseline:
            return self.num_pixels
        return self.num_pixels * (_SCANS_COST if self.has_scans else _INFLATE_COST)


class _Frame(NamedTuple):
    """A JPEG's frame header; `samplings` are horizontal and vertical, by channel."""

    marker: int
    precision: int
    width: int
    height: int
    samplings: tuple[tuple[int, int], ...]


def inspect(data: bytes | memoryview, *, max_pixels: int, max_bytes: int) -> ImageHeader:
    """Read and check the header without decoding anything.

    Raises:
        ImageTooLarge: over a limit.
        ImageUndecodable: another type of file, a broken header, or too short a file for its size.
    """
    if len(data) > max_bytes:
        raise too_large(len(data), max_bytes, "bytes")
    try:
        header, least_bytes = _parse(data)
    except (struct.error, IndexError):
        raise ImageUndecodable("the image header is cut short", field="image") from None
    if header.width < 1 or header.height < 1:
        raise ImageUndecodable("the image has no pixels", field="image")
    if header.num_pixels > max_pixels:
        raise too_large(header.num_pixels, max_pixels, "pixels")
    side = max(header.width, header.height)
    if side > MAX_SIDE:
        raise too_large(side, MAX_SIDE, "pixels on a side")
    if len(data) < least_bytes:
        raise ImageUndecodable(
            f"the file has {len(data)} bytes, its pixels need {least_bytes} at least",
            field="image",
            limit=least_bytes,
            actual=len(data),
        )
    decoded, most = header.num_pixels * _RGB, FREE_BYTES + MAX_RATIO * len(data)
    if decoded > most:
        raise too_large(decoded, most, "decoded bytes", f" for a file of {len(data)} bytes")
    return header


def check_scans(data: bytes | memoryview, header: ImageHeader, max_pixels: int) -> None:
    """Count the scans of a JPEG; reads all of it.

    Raises:
        ImageTooLarge: there are too many for its pixels.
    """
    limit = min(MAX_SCANS, max(1, MAX_SCANNED * max_pixels // header.num_pixels))
    if header.has_scans and (actual := _count_scans(data, limit)) > limit:
        raise too_large(actual, limit, "scans", f" for {header.num_pixels} pixels")


def too_large(actual: int, limit: int, unit: str, condition: str = "") -> ImageTooLarge:
    return ImageTooLarge(
        f"the image has {actual} {unit}, the limit is {limit}{condition}",
        field="image",
        limit=limit,
        actual=actual,
        unit=unit,
    )


def _too_many(limit: int, unit: str) -> ImageTooLarge:
    message = f"the image has more than {limit} {unit}"
    return ImageTooLarge(message, field="image", limit=limit, unit=unit)


def _parse(data: bytes | memoryview) -> tuple[ImageHeader, int]:
    """Return the header and the minimum bytes of a file with these dimensions."""
    head = bytes(data[:32])
    if head.startswith(b"\xff\xd8\xff"):
        return _parse_jpeg(data)
    if head.startswith(_PNG_SIGNATURE) and head[12:16] == b"IHDR":
        width, height, depth, colour_type = struct.unpack_from(">IIBB", head, 16)
        _check_chunks(data)
        row_bytes = 1 + -(-width * depth * _PNG_CHANNELS.get(colour_type, 0) // 8)
        header = ImageHeader("image/png", width, height, has_metadata=True)
        return header, row_bytes * height // MAX_RATIO
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return ImageHeader("image/webp", *_webp_size(head), has_metadata=True), 0
    raise ImageUndecodable("not a JPEG, PNG or WebP image", field="image")


# ---------------------------------------------------------------- JPEG


def _parse_jpeg(data: bytes | memoryview) -> tuple[ImageHeader, int]:
    frame: _Frame | None = None
    is_regular, has_metadata, scan_channels = True, False, 0
    try:
        for marker, start in jpeg_segments(data):
            has_metadata = has_metadata or marker == APP1
            if marker == SOS:
                scan_channels = data[start]
            elif marker in _FRAME_HEADERS:
                is_regular = frame is None
                frame = frame or _read_frame(data, marker, start)
    except (ImageUndecodable, IndexError):
        if frame is None:
            raise
        is_regular = False  # Pillow accepts some broken segments
    if frame is None:
        raise ImageUndecodable("JPEG without a frame header", field="image")
    channels = len(frame.samplings)
    is_baseline = (
        is_regular
        and frame.marker in _BASELINE
        and frame.precision == 8
        and scan_channels == channels
        and channels in (1, 3)
    )
    header = ImageHeader(
        "image/jpeg",
        frame.width,
        frame.height,
        is_baseline=is_baseline,
        has_scans=not is_baseline,
        has_metadata=has_metadata,
    )
    return header, _min_jpeg_bytes(frame)


def jpeg_segments(data: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """Yield each marker and the start of its content, up to the first scan.

    Raises:
        ImageUndecodable: a segment is broken.
        ImageTooLarge: there are too many.
        IndexError: the data end before the scan.
    """
    at = 2
    for _ in range(MAX_SEGMENTS):
        if data[at] != 0xFF:
            raise ImageUndecodable("broken JPEG segment", field="image")
        marker = data[at + 1]
        if marker in _WITHOUT_LENGTH:
            at += 1 if marker == 0xFF else 2  # fill byte, or a marker without a segment
            continue
        if marker == _EOI:
            return
        length = data[at + 2] << 8 | data[at + 3]
        yield marker, at + 4
        if marker == SOS:
            return
        at += 2 + max(length, 2)
    raise _too_many(MAX_SEGMENTS, "segments before a scan")


def _read_frame(data: bytes | memoryview, marker: int, start: int) -> _Frame:
    precision, height, width, channels = struct.unpack_from(">BHHB", data, start)
    factors = [data[start + 7 + 3 * index] for index in range(min(channels, 4))]
    samplings = tuple((factor >> 4 or 1, factor & 15 or 1) for factor in factors)
    return _Frame(marker, precision, width, height, samplings)


def _min_jpeg_bytes(frame: _Frame) -> int:
    """Return the minimum bytes: two Huffman codes per block, or one in a progressive file."""
    if frame.marker not in (*_BASELINE, _PROGRESSIVE) or not frame.samplings:
        return 0
    most_h = max(h for h, _ in frame.samplings)
    most_v = max(v for _, v in frame.samplings)
    blocks = sum(
        -(-frame.width * h // (8 * most_h)) * -(-frame.height * v // (8 * most_v))
        for h, v in frame.samplings
    )
    return blocks * (1 if frame.marker == _PROGRESSIVE else 2) // 8


def _count_scans(data: bytes | memoryview, limit: int) -> int:
    """Count scans up to `limit` + 1, as libjpeg finds them."""
    count, at = 0, 2
    for _ in range(MAX_SEGMENTS * (limit + 1)):
        found = _AFTER_SCAN.search(data, at)
        if found is None or data[found.start() + 1] == _EOI:
            return count
        count += data[found.start() + 1] == SOS
        at = found.end()
        if count > limit or at + 2 > len(data):
            return count
        at += max(data[at] << 8 | data[at + 1], 2)
    raise _too_many(MAX_SEGMENTS, "segments before a scan")


# ---------------------------------------------------------------- PNG and WebP


def _check_chunks(data: bytes | memoryview) -> None:
    at = len(_PNG_SIGNATURE)
    for _ in range(MAX_CHUNKS):
        if at + 8 > len(data) or data[at + 4 : at + 8] == b"IEND":
            return
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    raise _too_many(MAX_CHUNKS, "chunks")


def _webp_size(head: bytes) -> tuple[int, int]:
    kind = head[12:16]
    if kind == b"VP8X":
        low_w, high_w, low_h, high_h = struct.unpack_from("<HBHB", head, 24)
        return (low_w | high_w << 16) + 1, (low_h | high_h << 16) + 1
    if kind == b"VP8L" and head[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", head, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", head, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise ImageUndecodable("broken WebP header", field="image")
