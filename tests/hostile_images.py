"""Image files that cost their reader far more than they cost their sender."""

from __future__ import annotations

import functools
import io
import struct
import zlib

import numpy as np
from PIL import Image

_RGB = 2  # PNG colour type
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PART = 1 << 20  # bytes that are compressed at a time


def file(image: Image.Image, kind: str, **options: object) -> bytes:
    """Return an encoded image."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def smooth(width: int, height: int) -> Image.Image:
    """An image of colours that change slowly."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    """Return a chunk with a valid checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(
    width: int, height: int, *, depth: int = 8, colour_type: int = _RGB, extra: bytes = b""
) -> bytes:
    """A complete black PNG, as small as deflate makes it; `extra` chunks precede its pixels."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour_type]
    num_bytes = height * (1 + -(-width * depth * channels // 8))
    deflate = zlib.compressobj(9)
    parts = [
        deflate.compress(bytes(min(_PART, num_bytes - at))) for at in range(0, num_bytes, _PART)
    ]
    pixels = b"".join(parts) + deflate.flush()
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    return b"".join(
        (
            _PNG_SIGNATURE,
            png_chunk(b"IHDR", header),
            extra,
            png_chunk(b"IDAT", pixels),
            png_chunk(b"IEND", b""),
        )
    )


@functools.cache
def repeated_scans(side: int = 6000, count: int = 4000) -> bytes:
    """A progressive JPEG whose last scan is repeated; libjpeg decodes all of them."""
    data = file(Image.new("RGB", (side, side), "red"), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    scan = data[last:-2]
    short = scan[: 2 + int.from_bytes(scan[2:4], "big")] + b"\0"  # its data end at once
    return data[:-2] + short * count + data[-2:]


@functools.cache
def many_scans(side: int, count: int) -> bytes:
    """A progressive JPEG with whole repeated scans."""
    data = file(smooth(side, side), "JPEG", progressive=True, quality=70)
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * count + data[-2:]


def empty_segments(count: int = 3_900_000) -> bytes:
    """A JPEG of so many empty comments before its frame header."""
    data = file(Image.new("RGB", (40, 30), "red"), "JPEG")
    return data[:2] + b"\xff\xfe\0\2" * count + data[2:]


def fill_bytes(count: int = 15_000_000) -> bytes:
    """A JPEG of so many fill bytes before its frame header."""
    data = file(Image.new("RGB", (40, 30), "red"), "JPEG")
    return data[:2] + b"\xff" * count + data[2:]


def hidden_scans(side: int = 2000, count: int = 500) -> bytes:
    """Scans behind a comment that holds an end-of-image marker, and more comments."""
    data = file(smooth(side, side), "JPEG", progressive=True, quality=50)
    scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + (b"\xff\xfe\0\4\xff\xd9" + scan) * count + data[-2:]


def exif_entries(count: int = 60_000, num_bytes: int = 8_000_000) -> bytes:
    """An EXIF block whose entries all name the same large value."""
    entry = struct.pack("<HHII", 0x010E, 2, num_bytes, 8)
    block = b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", count) + entry * count
    return block + bytes(max(0, num_bytes - len(block)))


def hostile() -> dict[str, bytes]:
    """One of each kind."""
    return {
        "scans": repeated_scans(),
        "whole scans": many_scans(3000, 200),
        "hidden scans": hidden_scans(),
        "segments": empty_segments(),
        "fill bytes": fill_bytes(),
        "tall": png(1, 20_000_000, depth=1, colour_type=0),
        "claimed size": png(6300, 6300, depth=1, colour_type=0),
        "claimed colours": png(6300, 1)[:16]
        + struct.pack(">II", 6300, 6300)
        + png(6300, 1)[24:29]
        + b"\0\0\0\0"
        + png(6300, 1)[33:],
        "chunks": png(40, 30, extra=png_chunk(b"teSt", b"") * 1_200_000),
        "exif": png(40, 30, extra=png_chunk(b"eXIf", exif_entries())),
        "flat webp": file(Image.new("RGB", (6300, 6300)), "WEBP", lossless=True, method=0),
    }
