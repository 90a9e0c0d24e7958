"""Headers of image files: limits, orientation and uncompressed layouts."""

import io
import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legato_engine.errors import ImageTooLarge, ImageUndecodable, InvalidField, InvalidRequest
from legato_engine.images import headers
from legato_engine.images.decoding import decode_encoded
from legato_engine.images.headers import (
    ImageHeader,
    check_scans,
    displayed_size,
    inspect,
    orientation,
)
from legato_engine.images.raw import check_raw, decode_raw, num_bytes
from legato_engine.types import BlobRef, PixelFormat, RawImage
from PIL import Image

from tests import hostile_images
from tests.fakes import lines_run
from tests.hostile_images import exif_entries, file, png, png_chunk, smooth

MAX_PIXELS = 40_000_000
LIMITS = {"max_pixels": MAX_PIXELS, "max_bytes": 64 * 1024 * 1024}


def refusal(data):
    """The error of a file that its header condemns."""
    with pytest.raises(InvalidRequest) as caught:
        inspect(data, **LIMITS)
    return caught.value


@pytest.mark.parametrize(
    ("make", "unit", "limit"),
    [
        (hostile_images.empty_segments, "segments before a scan", headers.MAX_SEGMENTS),
        (hostile_images.fill_bytes, "segments before a scan", headers.MAX_SEGMENTS),
        (
            lambda: png(40, 30, extra=png_chunk(b"teSt", b"") * 1_200_000),
            "chunks",
            headers.MAX_CHUNKS,
        ),
        (lambda: png(1, 70_000), "pixels on a side", headers.MAX_SIDE),
        (lambda: png(70_000, 1), "pixels on a side", headers.MAX_SIDE),
        (lambda: png(6300, 6300, depth=1, colour_type=0), "decoded bytes", None),
        (
            lambda: file(Image.new("RGB", (6300, 6300)), "WEBP", lossless=True, method=0),
            "decoded bytes",
            None,
        ),
    ],
)
def test_the_header_of_a_hostile_file_names_the_limit(make, unit, limit):
    """A file beyond a limit is refused by its header, with little work whatever its size."""
    data = make()
    with lines_run() as count:
        error = refusal(data)
    assert count() < 50_000
    assert isinstance(error, ImageTooLarge)
    assert error.metadata["unit"] == unit
    assert limit is None or error.metadata["limit"] == str(limit)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "progressive"])
def test_a_file_too_short_for_its_pixels_is_undecodable(kind):
    """No deflated data and no Huffman codes are so short, so nothing is decoded."""
    if kind == "PNG":
        data = png(8, 8)
        data = data[:16] + struct.pack(">II", 6300, 6300) + data[24:]
    else:
        data = file(smooth(16, 16), "JPEG", progressive=kind == "progressive")
        at = data.index(b"\xff\xc2" if kind == "progressive" else b"\xff\xc0") + 5
        data = data[:at] + struct.pack(">HH", 6300, 6300) + data[at + 4 :]
    error = refusal(data)
    assert isinstance(error, ImageUndecodable)
    assert int(error.metadata["actual"]) == len(data) < int(error.metadata["limit"])


@pytest.mark.parametrize(
    "make", [hostile_images.repeated_scans, hostile_images.hidden_scans], ids=["plain", "hidden"]
)
def test_too_many_scans_are_counted_not_decoded(make):
    """Scans are counted as libjpeg finds them, also behind comments that look like the end."""
    data = make()
    header = inspect(data, **LIMITS)
    assert header.has_scans
    with lines_run() as count, pytest.raises(ImageTooLarge) as caught:
        check_scans(data, header, MAX_PIXELS)
    assert count() < 10_000
    assert caught.value.metadata["unit"] == "scans"


def test_scans_of_a_baseline_jpeg_count_too():
    """A baseline file whose channels have scans of their own may repeat them."""
    data = file(smooth(200, 200), "JPEG")
    scan = data[data.index(b"\xff\xda") : -2]
    assert inspect(data, **LIMITS).is_baseline
    single = scan[:4] + b"\1" + scan[5:7] + scan[11:]  # the scan of one channel
    single = single[:2] + struct.pack(">H", 8) + single[4:]
    split = data[: data.index(b"\xff\xda")] + single * 100 + data[-2:]
    header = inspect(split, **LIMITS)
    assert (header.is_baseline, header.has_scans) == (False, True)
    with pytest.raises(ImageTooLarge):
        check_scans(split, header, MAX_PIXELS)


SIZES = [
    (40, 30),
    (1920, 1080),
    pytest.param((3840, 2160), marks=pytest.mark.slow),
    pytest.param((5120, 2880), marks=pytest.mark.slow),
    (1, 20_000),
    (20_000, 1),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["JPEG", "progressive", "PNG", "WEBP", "lossless"])
@pytest.mark.parametrize("flat", [True, False])
def test_real_images_pass(size, kind, flat):
    """Flat screens, panoramas and photos of every kind are within all limits."""
    if kind in ("WEBP", "lossless") and max(size) > 16_383:
        pytest.skip("WebP has no such sides")
    image = Image.new("RGB", size, (20, 40, 60)) if flat else smooth(*size)
    options: dict[str, dict[str, Any]] = {
        "progressive": {"progressive": True},
        "lossless": {"lossless": True, "method": 0},
    }
    form = {"progressive": "JPEG", "lossless": "WEBP"}.get(kind, kind)
    header = inspect(data := file(image, form, **options.get(kind, {})), **LIMITS)
    check_scans(data, header, MAX_PIXELS)
    assert (header.width, header.height) == size


def test_a_blank_page_at_600_dots_per_inch_passes():
    """A scanned page of one bit for each pixel, with a little text."""
    page = Image.new("1", (4960, 4000), 1)
    assert inspect(file(page, "PNG"), **LIMITS).width == 4960


@pytest.mark.parametrize(
    ("options", "baseline"),
    [
        ({}, True),
        ({"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"}, True),
        ({"progressive": True}, False),
    ],
)
def test_what_counts_as_baseline(options, baseline):
    """A single Huffman-coded scan is linear in its pixels, whatever its metadata."""
    header = inspect(file(smooth(64, 48), "JPEG", **options), **LIMITS)
    assert (header.is_baseline, header.has_scans) == (baseline, not baseline)
    assert header.has_metadata is ("exif" in options)


def test_cmyk_is_not_baseline():
    """Four channels need Pillow."""
    assert not inspect(file(smooth(9, 9).convert("CMYK"), "JPEG"), **LIMITS).is_baseline


def test_cost_grows_with_the_format():
    """A format that takes longer to decode counts for more pixels."""
    costs = [
        ImageHeader("image/jpeg", 10, 10, is_baseline=True).cost,
        ImageHeader("image/png", 10, 10).cost,
        ImageHeader("image/jpeg", 10, 10, has_scans=True).cost,
    ]
    assert costs == sorted(costs)
    assert costs[0] == 100 < costs[1] < costs[2]


def test_a_tall_image_decodes():
    """One pixel wide and as tall as may be."""
    assert decode_encoded(png(1, headers.MAX_SIDE), max_pixels=MAX_PIXELS).shape == (65_535, 1, 3)


# ---------------------------------------------------------------- orientation
# Orientation of image files, as Pillow reads it.

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


# ---------------------------------------------------------------- raw
# Uncompressed images: checks of layouts, and conversion to RGB.

NV12, YUYV = PixelFormat.NV12, PixelFormat.YUYV


def colours(height=6, width=8):
    """Noise, [H, W, 3]."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


def layout(form, width, height, row_stride, size):
    """Return a raw image of this layout."""
    blob = BlobRef(name="", size=size)
    return RawImage(blob=blob, width=width, height=height, row_stride=row_stride, format=form)


@pytest.mark.parametrize(
    ("pixel_format", "order"),
    [
        (PixelFormat.RGB8, (0, 1, 2)),
        (PixelFormat.BGR8, (2, 1, 0)),
        (PixelFormat.RGBA8, (0, 1, 2, 0)),
        (PixelFormat.BGRA8, (2, 1, 0, 0)),
        (PixelFormat.MONO8, (1,)),
    ],
)
@pytest.mark.parametrize("padding", [0, 5])
def test_raw_layouts(pixel_format, order, padding):
    """Every layout gives the same pixels, as a copy; the last row has no padding."""
    rgb_HWC = colours()
    rows_HN = rgb_HWC[:, :, list(order)].reshape(6, -1)
    stride = rows_HN.shape[1] + padding
    data = b"".join(row.tobytes() + b"\xee" * padding for row in rows_HN)[: 6 * stride - padding]
    raw = layout(pixel_format, 8, 6, stride, len(data))
    expected_HWC = rgb_HWC[:, :, [1, 1, 1]] if len(order) == 1 else rgb_HWC
    writable = bytearray(data)
    decoded_HWC = decode_raw(memoryview(writable), raw)
    writable[:] = bytes(len(data))
    assert np.array_equal(decoded_HWC, expected_HWC)


@pytest.mark.parametrize(
    ("form", "width", "height", "stride", "size"),
    [
        (PixelFormat.RGB8, 0, 4, 12, 48),
        (PixelFormat.RGB8, 4, 0, 12, 48),
        (PixelFormat.RGB8, 4, 4, 11, 48),
        (PixelFormat.RGB8, 4, 4, 12, 47),
        (PixelFormat.RGB8, 1 << 31, 1 << 31, 12, 48),
        (NV12, 3, 4, 4, 48),
        (NV12, 4, 3, 4, 48),
        (NV12, 4, 4, 3, 48),
        (NV12, 4, 4, 4, 23),
        (NV12, 4, 4, 5, 28),
        (YUYV, 3, 4, 8, 48),
        (YUYV, 4, 4, 7, 48),
        (YUYV, 4, 4, 8, 31),
    ],
)
def test_a_layout_must_fit_its_bytes(form, width, height, stride, size):
    """A layout larger than its bytes, or with an odd side, is refused."""
    with pytest.raises(InvalidField):
        decode_raw(bytes(size), layout(form, width, height, stride, size))


def test_too_many_pixels():
    """The limit on pixels applies to raw images."""
    with pytest.raises(ImageTooLarge) as caught:
        check_raw(layout(NV12, 4, 4, 4, 24), max_pixels=15)
    assert (caught.value.metadata["limit"], caught.value.metadata["actual"]) == ("15", "16")


# ---------------------------------------------------------------- YUV


def rgb_of(luma, u, v):
    """Convert BT.601 in limited range in float64, and round."""
    light = (luma.astype(float) - 16) / 219
    blue = (u.astype(float) - 128) / 112 * (1 - 0.114)
    red = (v.astype(float) - 128) / 112 * (1 - 0.299)
    green = -(0.114 * blue + 0.299 * red) / 0.587
    levels = np.stack([light + red, light + green, light + blue], axis=-1) * 255
    return np.rint(levels.clip(0, 255))


def nv12(luma_HW, chroma_hwC, stride):
    """Return both planes, rows padded except the last."""
    rows = [row.tobytes() for row in luma_HW] + [row.tobytes() for row in chroma_hwC]
    return b"".join(row.ljust(stride, b"\xa5") for row in rows[:-1]) + rows[-1]


def yuyv(luma_HW, chroma_HwC, stride):
    """Return Y U Y V, rows padded except the last."""
    height, width = luma_HW.shape
    rows_HN = np.empty((height, width // 2, 4), np.uint8)
    rows_HN[:, :, 0], rows_HN[:, :, 2] = luma_HW[:, ::2], luma_HW[:, 1::2]
    rows_HN[:, :, 1], rows_HN[:, :, 3] = chroma_HwC[:, :, 0], chroma_HwC[:, :, 1]
    rows = [row.tobytes() for row in rows_HN]
    return b"".join(row.ljust(stride, b"\xa5") for row in rows[:-1]) + rows[-1]


def decoded(form, luma_HW, chroma_hwC, padding=0):
    """Decode these samples."""
    height, width = luma_HW.shape
    stride = width * (2 if form is YUYV else 1) + padding
    data = (yuyv if form is YUYV else nv12)(luma_HW, chroma_hwC, stride)
    assert len(data) == num_bytes(form, width, height, stride)
    return decode_raw(data, layout(form, width, height, stride, len(data)))


def test_known_colours():
    """Black, white, grey and the colour bars of BT.601 are decoded to their RGB."""
    bars = {  # 100 % bars: R, G, B to Y, U, V as the standard's tables have them
        (255, 255, 255): (235, 128, 128),
        (255, 255, 0): (210, 16, 146),
        (0, 255, 255): (170, 166, 16),
        (0, 255, 0): (145, 54, 34),
        (255, 0, 255): (106, 202, 222),
        (255, 0, 0): (81, 90, 240),
        (0, 0, 255): (41, 240, 110),
        (0, 0, 0): (16, 128, 128),
        (128, 128, 128): (126, 128, 128),
    }
    for rgb, (luma, u, v) in bars.items():
        for form, rows in ((NV12, 1), (YUYV, 2)):
            chroma_hwC = np.full((rows, 1, 2), (u, v), np.uint8)
            pixels_HWC = decoded(form, np.full((2, 2), luma, np.uint8), chroma_hwC)
            assert np.abs(pixels_HWC.astype(int) - rgb).max() <= 2, (form, rgb)


@settings(max_examples=100, deadline=None)
@given(
    form=st.sampled_from([NV12, YUYV]),
    pairs=st.integers(1, 40),
    tall=st.integers(1, 80),
    padding=st.integers(0, 7),
    seed=st.integers(0, 2**32),
)
def test_yuv_is_the_formula(form, pairs, tall, padding, seed):
    """Any samples, shape and stride give the result of the formula within one level."""
    height = 2 * tall if form is NV12 else tall
    rng = np.random.default_rng(seed)
    luma_HW = rng.integers(0, 256, (height, 2 * pairs), dtype=np.uint8)
    chroma_hwC = rng.integers(0, 256, (tall, pairs, 2), dtype=np.uint8)
    rows = np.arange(height) // (2 if form is NV12 else 1)
    columns = np.arange(2 * pairs) // 2
    of_pixel_HWC = chroma_hwC[rows][:, columns]
    expected_HWC = rgb_of(luma_HW, of_pixel_HWC[:, :, 0], of_pixel_HWC[:, :, 1])
    pixels_HWC = decoded(form, luma_HW, chroma_hwC, padding)
    assert np.abs(pixels_HWC - expected_HWC).max() <= 1


def test_every_sample_value_is_the_formula():
    """All pairs of chroma values, at every 15th luma value, are within one level of the formula."""
    u_hw, v_hw = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    chroma_hwC = np.stack([u_hw, v_hw], axis=-1)
    for luma in range(0, 256, 15):
        pixels_HWC = decoded(NV12, np.full((512, 512), luma, np.uint8), chroma_hwC)
        expected_hwC = rgb_of(np.full((256, 256), luma), u_hw, v_hw)
        assert np.abs(pixels_HWC[::2, ::2] - expected_hwC).max() <= 1
        assert np.array_equal(pixels_HWC[::2, ::2], pixels_HWC[1::2, 1::2])
