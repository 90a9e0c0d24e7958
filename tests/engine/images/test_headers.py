"""Limits that image files are held to before they are decoded."""

import struct
from typing import Any

import pytest
from legato_engine.errors import ImageTooLarge, ImageUndecodable, InvalidRequest
from legato_engine.images import headers
from legato_engine.images.decoding import decode_encoded
from legato_engine.images.headers import ImageHeader, check_scans, inspect
from PIL import Image

from tests import hostile_images
from tests.hostile_images import file, png, png_chunk, smooth
from tests.work import lines_run

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
