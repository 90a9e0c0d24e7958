"""Image files: refused by their header, or decoded."""

import contextlib
import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legato_engine.errors import ImageTooLarge, ImageUndecodable, InvalidRequest
from legato_engine.images.decoding import content_key, decode_encoded, image_id
from legato_engine.images.headers import ImageHeader, inspect
from legato_engine.types import BlobRef, PixelFormat, RawImage
from PIL import Image

LIMITS = {"max_pixels": 40_000_000, "max_bytes": 10_000_000}
ALL_PIXELS = 40_000_000
PILLOW = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp"}


def colours(height=6, width=8):
    """Noise, [H, W, 3]."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


def save(image, kind, **options):
    """Return an encoded image."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_chunk(kind, body):
    """Return a chunk with a valid checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def forged_png(width, height):
    """Return a PNG of any claimed size with hardly any pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = png_chunk(b"IDAT", zlib.compress(b"\0" * 100))
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + pixels + png_chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("size", [(1, 1), (17, 5), (1, 2000), (640, 480)])
def test_header(kind, size):
    """The header alone gives an image's type and size."""
    data = save(Image.new("RGB", size), kind)
    is_jpeg = kind == "JPEG"
    assert inspect(data, **LIMITS) == ImageHeader(
        PILLOW[kind], size[0], size[1], is_baseline=is_jpeg, has_metadata=not is_jpeg
    )
    assert decode_encoded(data, max_pixels=ALL_PIXELS).shape == (*size[::-1], 3)


@pytest.mark.parametrize("options", [{"lossless": True}, {"quality": 50}, {"exif": b"Exif\0\0"}])
def test_webp_header_kinds(options):
    """Lossy, lossless and extended WebP files have their size in the header."""
    data = save(Image.new("RGBA", (300, 7), (1, 2, 3, 128)), "WEBP", **options)
    assert inspect(data, **LIMITS) == ImageHeader("image/webp", 300, 7, has_metadata=True)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xd8\xff",
        b"GIF89a" + bytes(100),
        b"BM" + bytes(100),
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"\x89PNG\r\n\x1a\n",
        b"RIFF\0\0\0\0WEBPVP8 ",
        b"\xff\xd8\xff\xd9",
        b"%PDF-1.4" + bytes(50),
        forged_png(0, 10),
        forged_png(10, 0),
    ],
)
def test_not_an_image(data):
    """Bytes other than a JPEG, PNG or WebP with pixels are undecodable."""
    with pytest.raises(ImageUndecodable):
        inspect(data, **LIMITS)
    with pytest.raises(ImageUndecodable):
        decode_encoded(data, max_pixels=ALL_PIXELS)


def test_bomb_is_refused_by_its_header():
    """An image over the pixel limit is refused with limit and actual, whatever follows."""
    data = forged_png(65500, 65500)
    with pytest.raises(ImageTooLarge) as caught:
        inspect(data, **LIMITS)
    assert caught.value.metadata["limit"] == "40000000"
    assert caught.value.metadata["actual"] == str(65500 * 65500)
    with pytest.raises(ImageTooLarge):
        decode_encoded(data, max_pixels=ALL_PIXELS)


def test_too_many_bytes():
    """A file over the byte limit is refused before its header is read."""
    with pytest.raises(ImageTooLarge) as caught:
        inspect(b"x" * 11, max_pixels=100, max_bytes=10)
    assert caught.value.metadata == {
        "field": "image",
        "limit": "10",
        "actual": "11",
        "unit": "bytes",
    }


def test_second_header_cannot_contradict_the_first():
    """A PNG whose second IHDR is larger than the checked one is not decoded."""
    data = forged_png(2, 2)
    large = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 5000, 5000, 8, 2, 0, 0, 0))
    with pytest.raises(ImageUndecodable):
        decode_encoded(data[:33] + large + data[33:], max_pixels=ALL_PIXELS)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_truncated(kind):
    """A file cut off in its pixels is undecodable, never half an image."""
    data = save(Image.fromarray(colours(100, 100)), kind)
    with pytest.raises(ImageUndecodable):
        decode_encoded(data[: len(data) // 2], max_pixels=ALL_PIXELS)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(kind, orientation):
    """An image is decoded upright under every EXIF orientation."""
    shown_HWC = np.zeros((32, 48, 3), np.uint8)
    shown_HWC[:16, :16] = (255, 0, 0)
    shown_HWC[:16, 32:] = (0, 255, 0)
    shown_HWC[16:, :16] = (0, 0, 255)
    to_stored = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.swapaxes(0, 1),
        6: lambda a: np.rot90(a, 1),  # shown by turning it clockwise
        7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
        8: lambda a: np.rot90(a, -1),
    }
    stored_HWC = np.ascontiguousarray(to_stored[orientation](shown_HWC))
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, dict[str, int]] = {
        "WEBP": {"lossless": True},
        "JPEG": {"quality": 95, "subsampling": 0},
    }
    data = save(Image.fromarray(stored_HWC), kind, exif=exif.tobytes(), **options.get(kind, {}))
    decoded_HWC = decode_encoded(data, max_pixels=ALL_PIXELS).astype(int)
    assert decoded_HWC.shape == shown_HWC.shape
    assert np.abs(decoded_HWC - shown_HWC).mean() < 4


def test_orientation_in_xmp():
    """Without EXIF the orientation comes from XMP, as in Pillow."""
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"></rdf:Description></x:xmpmeta>'
    data = save(Image.new("RGB", (48, 32)), "JPEG", xmp=xmp)
    assert decode_encoded(data, max_pixels=ALL_PIXELS).shape == (48, 32, 3)


def test_broken_exif_does_not_lose_the_image():
    """An image with a broken EXIF block is decoded as stored."""
    data = save(Image.new("RGB", (4, 3)), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff junk")
    assert decode_encoded(data, max_pixels=ALL_PIXELS).shape == (3, 4, 3)


def as_mode(mode):
    """Return an image of a Pillow mode and its RGB."""
    grey_HW = colours()[:, :, 0]
    rgb = Image.fromarray(colours())
    match mode:
        case "L":
            return Image.fromarray(grey_HW), np.repeat(grey_HW[:, :, None], 3, 2)
        case "1":
            image = Image.fromarray(grey_HW).point(lambda v: 255 * (v > 127), "1")
            return image, np.asarray(image.convert("RGB"))
        case "LA":
            image = Image.fromarray(grey_HW).convert("LA")
            image.putalpha(51)  # a fifth
            shown_HW = np.rint((grey_HW + 4.0 * 255) / 5).astype(np.uint8)
            return image, np.repeat(shown_HW[:, :, None], 3, 2)
        case "RGBA":
            alpha_HW = np.resize(np.array([0, 255], np.uint8), grey_HW.shape)
            image = Image.fromarray(np.dstack([colours(), alpha_HW]))
            return image, np.where(alpha_HW[:, :, None] == 0, 255, colours())
        case "P":
            image = rgb.quantize(8)
            return image, np.asarray(image.convert("RGB"))
        case "I;16":
            wide_HW = grey_HW.astype(np.uint16) << 8 | 0x7F
            return Image.fromarray(wide_HW), np.repeat(grey_HW[:, :, None], 3, 2)
    raise AssertionError(mode)


@pytest.mark.parametrize("mode", ["L", "1", "LA", "RGBA", "P", "I;16"])
def test_png_modes(mode):
    """Every PNG colour type becomes RGB: grey replicated, alpha on white, 16 bits cut to 8."""
    image, expected_HWC = as_mode(mode)
    decoded_HWC = decode_encoded(save(image, "PNG"), max_pixels=ALL_PIXELS)
    assert decoded_HWC.dtype == np.uint8
    assert np.array_equal(decoded_HWC, expected_HWC)


def test_transparent_palette_is_shown_on_white():
    """A transparent entry of a palette is white, a translucent one is mixed with it."""
    image = Image.fromarray(colours()).quantize(8)
    alpha_HW1 = np.array([0, 255, 128, 255, 0, 0, 51, 255])[np.asarray(image)][:, :, None]
    opaque_HWC = np.asarray(image.convert("RGB")).astype(float)
    expected_HWC = np.rint((opaque_HWC * alpha_HW1 + 255.0 * (255 - alpha_HW1)) / 255)
    data = save(image, "PNG", transparency=bytes([0, 255, 128, 255, 0, 0, 51]))
    decoded_HWC = decode_encoded(data, max_pixels=ALL_PIXELS)
    assert np.abs(decoded_HWC - expected_HWC).max() <= 1


TRANSPARENT_COLOURS = {  # colour type, depth: samples, the transparent ones, what is shown
    (0, 8): (bytes([1, 2, 3]), [2], [1, 255, 3]),
    (0, 16): (struct.pack(">3H", 0x1234, 0x1200, 7), [0x1234], [255, 0x12, 0]),
    (2, 8): (bytes([1, 2, 3, 1, 2, 4, 3, 2, 1]), [1, 2, 3], [255, 255, 255, 1, 2, 4, 3, 2, 1]),
    (2, 16): (
        struct.pack(">9H", 0, 1, 2, 0, 0, 0, 256, 512, 768),
        [0, 1, 2],
        [0, 0, 0, 0, 0, 0, 1, 2, 3],  # Pillow has no 16-bit colours to compare: none is hidden
    ),
}


@pytest.mark.parametrize(("colour_type", "depth"), TRANSPARENT_COLOURS)
def test_a_transparent_colour_is_white(colour_type, depth):
    """The one colour that a PNG without alpha declares transparent, and none that is near it."""
    samples, colour, expected = TRANSPARENT_COLOURS[colour_type, depth]
    header = struct.pack(">IIBBBBB", 3, 1, depth, colour_type, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header)
    data += png_chunk(b"tRNS", struct.pack(f">{len(colour)}H", *colour))
    data += png_chunk(b"IDAT", zlib.compress(b"\0" + samples)) + png_chunk(b"IEND", b"")
    decoded_HWC = decode_encoded(data, max_pixels=ALL_PIXELS)
    expected_HWC = np.reshape(expected, (1, 3, -1))
    assert np.array_equal(decoded_HWC, np.broadcast_to(expected_HWC, (1, 3, 3)))


def test_the_colours_under_alpha_of_a_webp_are_hidden():
    """A WebP is composited as a PNG is."""
    image = Image.new("RGBA", (8, 6), (200, 0, 0, 0))
    image.putpixel((3, 2), (10, 20, 30, 255))
    data = save(image, "WEBP", lossless=True, exact=True)
    expected_HWC = np.full((6, 8, 3), 255, np.uint8)
    expected_HWC[2, 3] = (10, 20, 30)
    assert np.array_equal(decode_encoded(data, max_pixels=ALL_PIXELS), expected_HWC)


def test_cmyk_jpeg():
    """A CMYK JPEG is converted to RGB."""
    cmyk = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    decoded_HWC = decode_encoded(save(cmyk, "JPEG"), max_pixels=ALL_PIXELS)
    assert np.abs(decoded_HWC.astype(int) - (255, 0, 0)).max() < 6


def pillow_pixels(data):
    """Return the pixels that Pillow decodes, without orientation."""
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1), (2, 3), (17, 15), (101, 100), (256, 8)])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"subsampling": "4:4:4"},
        {"subsampling": "4:2:2"},
        {"subsampling": "4:2:0"},
        {"subsampling": "4:1:1"},
        {"subsampling": "4:2:0", "restart_marker_rows": 1},
        {"keep_rgb": True},
        {"grey": True},
        {"cmyk": True},
    ],
)
def test_jpeg_pixels_are_those_of_pillow(size, progressive, options):
    """Every JPEG decodes to the same bits as with Pillow, whichever decoder is used."""
    options = dict(options)
    image = Image.fromarray(colours(4, 5)).resize(size, Image.Resampling.BICUBIC)
    for mode, name in (("L", "grey"), ("CMYK", "cmyk")):
        image = image.convert(mode) if options.pop(name, False) else image
    for quality in (40, 90):
        data = save(image, "JPEG", progressive=progressive, quality=quality, **options)
        decoded_HWC = decode_encoded(memoryview(data), max_pixels=ALL_PIXELS)
        assert np.array_equal(decoded_HWC, pillow_pixels(data))


@pytest.mark.parametrize("missing", [1, 2, 3, 20])
def test_a_jpeg_without_its_end_is_truncated(missing):
    """A JPEG without its end marker is undecodable."""
    data = save(Image.fromarray(colours(100, 100)), "JPEG")
    with pytest.raises(ImageUndecodable):
        decode_encoded(data[:-missing], max_pixels=ALL_PIXELS)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_corrupt_jpeg_is_what_pillow_makes_of_it(data):
    """A damaged JPEG has Pillow's pixels if Pillow decodes it, and is undecodable otherwise."""
    progressive = data.draw(st.booleans())
    file = bytearray(save(Image.fromarray(colours(40, 40)), "JPEG", progressive=progressive))
    behind_size = file.index(b"\xff\xc2" if progressive else b"\xff\xc0") + 9
    for _ in range(data.draw(st.integers(1, 4))):
        file[data.draw(st.integers(behind_size, len(file) - 1))] = data.draw(st.integers(0, 255))
    try:
        expected_HWC = pillow_pixels(bytes(file))
    except Exception:  # noqa: BLE001 - whatever the corrupt bytes trip
        expected_HWC = None
    try:
        decoded_HWC = decode_encoded(bytes(file), max_pixels=ALL_PIXELS)
    except InvalidRequest:
        decoded_HWC = None
    assert (decoded_HWC is None) == (expected_HWC is None)
    assert decoded_HWC is None or np.array_equal(decoded_HWC, expected_HWC)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_first_frame_of_an_animation(kind):
    """The first frame of an animated file is used."""
    frames = [Image.new("RGB", (8, 8), c) for c in ("red", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = save(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert tuple(decode_encoded(data, max_pixels=ALL_PIXELS)[0, 0]) == (255, 0, 0)


def test_content_key_names_layout():
    """The same bytes in another raw layout are another image."""
    blob = BlobRef(name="", size=12)
    wide = RawImage(blob=blob, width=4, height=1, row_stride=12, format=PixelFormat.RGB8)
    tall = RawImage(blob=blob, width=1, height=4, row_stride=3, format=PixelFormat.RGB8)
    keys = {content_key(bytes(12)), content_key(bytes(12), wide), content_key(bytes(12), tall)}
    assert len(keys) == 3
    assert image_id("ab" * 32) == "img_" + "ab" * 16


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_files_raise_only_invalid_request(data):
    """Corrupt bytes either decode or raise `InvalidRequest`; nothing else escapes."""
    kind = data.draw(st.sampled_from(["JPEG", "PNG", "WEBP"]))
    file = bytearray(save(Image.fromarray(colours(16, 16)), kind))
    for _ in range(data.draw(st.integers(1, 8))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(InvalidRequest):
        assert decode_encoded(bytes(file), max_pixels=10_000).shape[2] == 3
