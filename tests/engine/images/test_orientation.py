"""Orientation of image files, as Pillow reads it."""

import io
import struct
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legato_engine.images.headers import displayed_size, inspect, orientation
from PIL import Image

from tests.hostile_images import exif_entries, file, png, png_chunk
from tests.work import lines_run

TAG = 0x0112
XMP = '<x:xmpmeta><rdf:Description tiff:Orientation="%d"></rdf:Description></x:xmpmeta>'


def ours(data):
    """The orientation of a file."""
    return orientation(data, inspect(data, max_pixels=10**6, max_bytes=10**8))


def pillows(data):
    """The orientation according to Pillow, upright for values that mean nothing."""
    value = Image.open(io.BytesIO(data)).getexif().get(TAG, 1)
    return value if value in range(1, 9) else 1


def exif(value):
    """An EXIF block with other tags around the orientation."""
    block = Image.Exif()
    block[0x010E], block[0x010F], block[TAG], block[0x0131] = "a scene", "maker", value, "software"
    return block.tobytes()


def big_endian(value, kind=3):
    """An EXIF block in the byte order of other cameras."""
    body = {1: "B3x", 3: "H2x", 4: "I"}[kind]
    entry = struct.pack(">HHI" + body, TAG, kind, 1, value)
    return b"Exif\0\0MM\0*" + struct.pack(">IH", 8, 1) + entry + bytes(4)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("value", range(10))
@pytest.mark.parametrize("make", [exif, big_endian])
def test_exif(kind, value, make):
    """The tag of either byte order, in each kind of file."""
    data = file(Image.new("RGB", (4, 3)), kind, exif=make(value))
    assert ours(data) == pillows(data)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
@pytest.mark.parametrize("value", [1, 3, 6, 8])
def test_xmp(kind, value):
    """XMP counts where EXIF has no orientation."""
    image, xmp = Image.new("RGB", (4, 3)), (XMP % value).encode()
    assert ours(file(image, kind, xmp=xmp)) == value
    other = Image.Exif()
    other[0x010E] = "a scene"
    assert ours(data := file(image, kind, xmp=xmp, exif=other.tobytes())) == pillows(data) == value
    assert ours(file(image, kind, xmp=xmp, exif=exif(5))) == 5


@pytest.mark.parametrize("compressed", [False, True])
def test_xmp_in_a_png(compressed):
    """A PNG has its XMP in an international text, compressed or not."""
    text = (XMP % 6).encode()
    body = zlib.compress(text) if compressed else text
    chunk = b"XML:com.adobe.xmp\0" + bytes((compressed, 0)) + b"\0\0" + body
    data = png(4, 3, extra=png_chunk(b"iTXt", chunk))
    assert ours(data) == pillows(data) == 6


@pytest.mark.parametrize("kind", [b"tEXt", b"zTXt"])
def test_the_raw_profile_of_a_png(kind):
    """ImageMagick wrote EXIF as hexadecimal text."""
    block = exif(8)
    text = f"\nexif\n{len(block):8}\n{block.hex()}\n".encode()
    body = b"\0" + zlib.compress(text) if kind == b"zTXt" else text
    data = png(4, 3, extra=png_chunk(kind, b"Raw profile type exif\0" + body))
    assert ours(data) == pillows(data) == 8


def test_exif_behind_the_pixels_of_a_png():
    """The chunk may follow the pixels."""
    data = png(4, 3)
    chunk = png_chunk(b"eXIf", exif(6)[6:])
    assert ours(data[:-12] + chunk + data[-12:]) == 6


def test_the_displayed_size_is_turned():
    """Width and height swap for an image on its side."""
    data = file(Image.new("RGB", (40, 30)), "JPEG", exif=exif(6))
    header = inspect(data, max_pixels=10**6, max_bytes=10**6)
    assert displayed_size(data, header) == (30, 40)
    assert (header.width, header.height) == (40, 30)


def test_a_hostile_block_costs_nothing():
    """Entries that all name the same eight megabytes are passed over."""
    data = png(4, 3, extra=png_chunk(b"eXIf", exif_entries()))
    tracemalloc.start()
    try:
        with lines_run() as count:
            assert ours(data) == 1
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count() < 50_000
    assert most < len(data) // 8


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_broken_block_is_never_an_error(data):
    """Whatever the bytes of metadata, there is an orientation."""
    kind = data.draw(st.sampled_from(["JPEG", "PNG", "WEBP"]))
    made = bytearray(file(Image.new("RGB", (4, 3)), kind, exif=exif(6)))
    header = inspect(bytes(made), max_pixels=10**6, max_bytes=10**6)
    for _ in range(data.draw(st.integers(1, 6))):
        made[data.draw(st.integers(12, len(made) - 1))] = data.draw(st.integers(0, 255))
    assert orientation(bytes(made), header) in range(1, 9)
