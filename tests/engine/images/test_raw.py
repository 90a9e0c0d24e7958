"""Uncompressed images: checks of layouts, and conversion to RGB."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legato_engine.errors import ImageTooLarge, InvalidField
from legato_engine.images.raw import check_raw, decode_raw, num_bytes
from legato_engine.types import BlobRef, PixelFormat, RawImage

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
