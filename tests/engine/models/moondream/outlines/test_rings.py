"""Masks to rings and back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legato_engine.models.moondream import outline_shapes

from tests.engine.models.moondream.outlines.shapes import SHAPES, disc

masks = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 1 << 30)).map(
    lambda drawn: np.random.default_rng(drawn[2]).random(drawn[:2]) < 0.5
)


@settings(max_examples=200, deadline=None)
@given(mask=masks)
def test_rings_enclose_exactly_their_mask(mask):
    """Filling all rings gives the mask, and their areas add up to it."""
    found = outline_shapes.trace(mask)
    assert np.array_equal(outline_shapes.fill(found, mask.shape), mask)
    assert sum(map(outline_shapes.area, found)) == mask.sum()


@settings(max_examples=100, deadline=None)
@given(mask=masks)
def test_a_ring_is_a_closed_walk_of_unit_steps(mask):
    """Corners are one unit apart, the last and the first too, and no step repeats."""
    steps: set[tuple[object, object]] = set()
    for ring in outline_shapes.trace(mask):
        ahead = np.roll(ring, -1, axis=0)
        assert (np.abs(ahead - ring).sum(axis=1) == 1).all()
        walked = {(tuple(a), tuple(b)) for a, b in zip(ring.tolist(), ahead.tolist(), strict=True)}
        assert len(walked) == len(ring)
        assert not walked & steps
        steps |= walked


@pytest.mark.parametrize(("shape", "signs"), [("ring", "+-"), ("islands", "++"), ("disc", "+")])
def test_islands_turn_one_way_and_holes_the_other(shape, signs):
    """The sign of a ring's area distinguishes them."""
    found = [
        "+" if outline_shapes.area(ring) > 0 else "-"
        for ring in outline_shapes.trace(SHAPES[shape]())
    ]
    assert "".join(found) == signs


def test_pixels_that_touch_at_a_corner_are_one_island():
    """A diagonal has one ring."""
    assert len(outline_shapes.trace(np.eye(5, dtype=bool))) == 1


def test_an_empty_mask_has_no_ring():
    """Cleaning keeps it empty."""
    empty = np.zeros((3, 4), bool)
    assert outline_shapes.trace(empty) == []
    assert not outline_shapes.cleaned(empty, 2).any()


def test_small_holes_are_filled_and_small_islands_go():
    """Those below the given area go, larger ones stay."""
    mask = disc() & ~disc(150, 150, 5) & ~disc(120, 120, 20) | disc(20, 20, 5) | disc(270, 270, 20)
    expected = disc() & ~disc(120, 120, 20) | disc(270, 270, 20)
    assert np.array_equal(outline_shapes.cleaned(mask, 100), expected)


def test_the_largest_island_stays_however_small():
    """Cleaning never empties a mask."""
    mask = disc(50, 50, 4) | disc(100, 100, 6)
    assert np.array_equal(outline_shapes.cleaned(mask, 1000), disc(100, 100, 6))


def test_cracks_of_a_pixel_close():
    """Within a shape, and at the edge of the image."""
    mask = np.ones((20, 20), bool)
    mask[:, 10] = False
    assert outline_shapes.cleaned(mask, 1).all()
