"""The orientation of image files: EXIF first, then XMP, as image viewers read them.

Only the tag itself is read, so that the size of a block and the number of its entries cost nothing.
A block that is broken or beyond the limits counts as absent.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator

from legato_engine.errors import LegatoError
from legato_engine.images.headers import APP1, ImageHeader, jpeg_segments

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
