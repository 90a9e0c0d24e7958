"""The resize in integers is the one of Pillow, to the bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legato_engine.kernels.images import PRECISION_BITS, num_weights, resize, table
from PIL import Image

SIZES = [
    ((600, 850), (378, 378)),
    ((600, 850), (644, 1176)),
    ((378, 378), (378, 378)),
    ((378, 900), (378, 378)),
    ((900, 378), (378, 378)),
    ((50, 70), (378, 378)),
    ((700, 20), (30, 200)),
    ((20, 700), (200, 30)),
    ((1, 1), (56, 56)),
    ((1, 500), (56, 56)),
    ((500, 1), (56, 56)),
    ((90, 90), (1, 1)),
    ((90, 1), (1, 90)),
    ((3000, 5), (7, 6)),
    ((640, 480), (378, 378)),
    ((583, 480), (378, 378)),
    ((582, 480), (378, 378)),
]


def noise(height, width):
    """[height, width, 3], half of it at the ends of the range, where results are clipped."""
    rng = np.random.default_rng(height * 10007 + width)
    pixels_HWC = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    ends_HWC = rng.choice(np.array([0, 255], np.uint8), (height, width, 3))
    return np.where(rng.random((height, width, 1)) < 0.5, pixels_HWC, ends_HWC)


def by_pillow(pixels_HWC, height, width):
    """The same by Pillow."""
    image = Image.fromarray(pixels_HWC)
    return np.asarray(image.resize((width, height), Image.Resampling.LANCZOS))


@pytest.mark.parametrize(("size", "to"), SIZES)
def test_pixels_are_those_of_pillow(size, to):
    """Larger, smaller, mixed, equal and one pixel wide: every bit is Pillow's."""
    pixels_HWC = noise(*size)
    assert np.array_equal(resize(pixels_HWC, *to), by_pillow(pixels_HWC, *to))


@settings(max_examples=150, deadline=None)
@given(*[st.integers(1, 160)] * 4)
def test_any_size_is_that_of_pillow(height, width, to_height, to_width):
    """No pair of sizes differs from Pillow."""
    pixels_HWC = noise(height, width)
    expected_HWC = by_pillow(pixels_HWC, to_height, to_width)
    assert np.array_equal(resize(pixels_HWC, to_height, to_width), expected_HWC)


@given(st.integers(1, 5000), st.integers(1, 1500))
def test_a_table_stays_inside_the_image(size_in, size_out):
    """No weight lies outside of the image, and the weights of a pixel add up to one."""
    weights = table(size_in, size_out)
    ends_O = weights.starts_O + weights.counts_O
    assert weights.starts_O.min() >= 0
    assert ends_O.max() <= size_in
    assert weights.weights_OK.shape == (size_out, num_weights(size_in, size_out))
    assert weights.counts_O.max() <= weights.weights_OK.shape[1]
    sums_O = weights.weights_OK.sum(axis=1)
    assert np.abs(sums_O - (1 << PRECISION_BITS)).max() <= weights.weights_OK.shape[1]


@pytest.mark.parametrize(("size_in", "size_out"), [(850, 378), (379, 910), (4000, 378), (7, 1176)])
def test_weights_are_those_of_the_math_library(size_in, size_out):
    """A weight worked out one by one is the one in the table."""
    weights = table(size_in, size_out)
    scale = size_in / size_out
    stretch = max(scale, 1.0)

    def lanczos(x):
        if x == 0.0:
            return 1.0
        if not -3.0 <= x < 3.0:
            return 0.0
        part = x / 3.0 * math.pi
        return math.sin(x * math.pi) / (x * math.pi) * (math.sin(part) / part)

    for pixel in range(size_out):
        start, count = int(weights.starts_O[pixel]), int(weights.counts_O[pixel])
        centre = (pixel + 0.5) * scale
        row = [lanczos((tap + start - centre + 0.5) * (1.0 / stretch)) for tap in range(count)]
        total = 0.0
        for value in row:
            total += value
        fixed = [value / total * (1 << PRECISION_BITS) for value in row]
        expected = [int(value + math.copysign(0.5, value)) for value in fixed]
        assert weights.weights_OK[pixel, :count].tolist() == expected
        assert not weights.weights_OK[pixel, count:].any()


def test_tables_cannot_be_changed():
    """Tables are read-only, because they are shared."""
    assert table(10, 20) is table(10, 20)
    with pytest.raises(ValueError, match="read-only"):
        table(10, 20).weights_OK[0, 0] = 1
