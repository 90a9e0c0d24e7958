"""A plan states its size, and images that exceed the device's buffers get none."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from legato_engine.kernels.images import (
    HEADER_WORDS,
    MAX_PIXELS,
    MAX_WORDS,
    TARGET_WORDS,
    CropGeometry,
    CutPlan,
)

GEOMETRY = CropGeometry(crop_size=378, patch_size=14, margin=4)


def test_the_layout_of_a_plan():
    """The words say what the kernels read from them, by the order of the passes."""
    plan = CutPlan(height=640, width=480, tiling=(4, 2), geometry=GEOMETRY)
    words = np.full(plan.num_words + 1, -7, np.int32)
    assert plan.write(words) == plan.num_words
    assert words[-1] == -7
    assert words[:HEADER_WORDS].tolist() == [4, 2, 480, 9]
    whole = words[HEADER_WORDS:][:TARGET_WORDS].tolist()
    tables_at = HEADER_WORDS + 2 * TARGET_WORDS
    assert whole == [378, 480, 1, tables_at, 378, 13, tables_at + 378 * 15, 378, 9]
    canvas = words[HEADER_WORDS + TARGET_WORDS :][:TARGET_WORDS].tolist()
    columns_at = tables_at + 378 * (15 + 11)
    assert canvas == [640, 644, 0, columns_at, 644, 7, columns_at + 644 * 9, 1176, 7]


def test_an_untiled_image_has_no_canvas():
    """The canvas of a tiling of (1, 1) has no pixels, whatever the words held before."""
    plan = CutPlan(height=300, width=200, tiling=(1, 1), geometry=GEOMETRY)
    words = np.full(MAX_WORDS, -7, np.int32)
    plan.write(words)
    assert plan.num_crops == 1
    assert not words[HEADER_WORDS + TARGET_WORDS :][:TARGET_WORDS].any()


@pytest.mark.parametrize(
    ("size", "tiling", "fits"),
    [
        ((4096, 4096), (3, 3), True),
        ((4097, 4096), (3, 3), False),
        ((2000, 8000), (1, 6), True),
        ((1, MAX_PIXELS), (1, 1), False),
        ((MAX_PIXELS, 1), (1, 1), False),
        ((1, 1), (1, 1), True),
        ((1, 30000), (1, 1), True),
    ],
)
def test_what_has_room(size, tiling, fits):
    """Large and very long images do not fit; the largest square does."""
    height, width = size
    assert CutPlan(height, width, tiling, GEOMETRY).fits is fits


@given(st.integers(1, 9000), st.integers(1, 9000), st.sampled_from([(1, 1), (3, 4), (1, 9)]))
def test_what_fits_is_within_the_buffers(height, width, tiling):
    """A plan that fits overruns neither the pixels between the passes nor the words."""
    plan = CutPlan(height, width, tiling, GEOMETRY)
    if plan.fits:
        assert (
            sum(h * w for h, w in (target.intermediate_size for target in plan.targets))
            <= MAX_PIXELS
        )
        assert plan.num_words <= MAX_WORDS
        assert height * width <= MAX_PIXELS


def test_a_plan_is_a_value():
    """Two plans of one image are equal."""
    plan = CutPlan(30, 20, (1, 1), GEOMETRY)
    assert plan == dataclasses.replace(plan)
    assert plan != dataclasses.replace(plan, tiling=(2, 1))
