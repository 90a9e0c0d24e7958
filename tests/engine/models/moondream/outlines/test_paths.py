"""SVG paths to masks, compared with a renderer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legato_engine.models.moondream import outline_shapes

from tests.engine.models.moondream.outlines.shapes import drawn, overlap

SIDE = 160
SHIFT = (0.00125, 0.0021)  # so that no border runs along middles or borders of pixels
BOX = (*SHIFT, 1 + SHIFT[0], 1 + SHIFT[1])
PATHS = {
    "lines": "M 0.1,0.1 L 0.9,0.2 0.7,0.8 Z",
    "level and upright": "M 0.1,0.1 H 0.9 V 0.9 h -0.3 v -0.3 H 0.1 Z",
    "relative": "m 0.1,0.1 l 0.8,0 0,0.8 -0.4,-0.2 z m 0.1,0.05 l 0.1,0 0,0.1 z",
    "more places behind a move": "M 0.1,0.1 0.9,0.1 0.5,0.9 z m 0,-0.3 0.1,0.1 0.1,-0.2",
    "cubic": "M 0.1,0.5 C 0.1,0 0.9,0 0.9,0.5 c 0,0.3 -0.3,0.4 -0.4,0.4 Z",
    "smooth cubic": "M 0.1,0.5 C 0.1,0.2 0.4,0.2 0.5,0.5 S 0.9,0.9 0.9,0.5 s -0.3,0.4 -0.4,0.4 z",
    "smooth cubic behind a line": "M 0.1,0.5 L 0.3,0.2 S 0.9,0.1 0.9,0.6 Z",
    "quadratic": "M 0.1,0.5 Q 0.5,-0.1 0.9,0.5 q -0.2,0.5 -0.5,0.3 Z",
    "smooth quadratic": "M 0.1,0.5 Q 0.3,0.1 0.5,0.5 T 0.9,0.5 t -0.2,0.4 Z",
    "arc": "M 0.2,0.5 A 0.3,0.3 0 0,1 0.8,0.5 Z",
    "large arc": "M 0.3,0.5 A 0.3,0.2 30 1,0 0.7,0.6 Z",
    "arc the other way": "M 0.3,0.5 A 0.3,0.2 30 1,1 0.7,0.6 Z",
    "small arc": "M 0.3,0.5 a 0.3,0.4 -20 0,0 0.3,0.2 L 0.3,0.9 Z",
    "arc too small for its ends": "M 0.1,0.5 A 0.1,0.05 0 0,1 0.9,0.5 Z",
    "arc without a radius": "M 0.1,0.5 A 0,0.3 0 0,1 0.9,0.5 L 0.5,0.9 Z",
    "a hole": "M 0.1,0.1 H 0.9 V 0.9 H 0.1 Z M 0.3,0.3 V 0.7 H 0.7 V 0.3 Z",
    "no hole": "M 0.1,0.1 H 0.9 V 0.9 H 0.1 Z M 0.3,0.3 H 0.7 V 0.7 H 0.3 Z",
    "crossing itself": "M 0.5,0.05 L 0.8,0.95 0.05,0.4 0.95,0.4 0.2,0.95 Z",
    "not closed": "M 0.1,0.1 L 0.9,0.2 0.5,0.9 M 0.1,0.9 L 0.2,0.9 0.2,0.8",
    "on behind an end": "M 0.1,0.1 H 0.4 V 0.4 Z L 0.1,0.9 0.6,0.9 z",
    "beyond the image": "M -0.5,0.2 L 1.5,-0.3 0.8,1.7 Z",
}


def ours(path):
    """Our mask of a path."""
    middles = np.arange(SIDE, dtype=np.float64) + 0.5
    rings = [(ring + SHIFT) * SIDE for ring in outline_shapes.polygons(path)]
    return outline_shapes.enclosed(rings, middles, middles)


@pytest.mark.parametrize("name", PATHS)
def test_every_command_draws_what_a_renderer_draws(name):
    """The whole grammar, in either case, except at the border."""
    path = PATHS[name]
    assert overlap(ours(path), drawn(path, BOX, SIDE, SIDE)) > 0.985


places = st.lists(
    st.tuples(st.integers(-20, 180), st.integers(-20, 180)), min_size=3, max_size=7, unique=True
)


@settings(max_examples=60, deadline=None)
@given(rings=st.lists(places, min_size=1, max_size=3))
def test_polygons_are_filled_as_a_renderer_fills_them(rings):
    """Polygons that cross each other and themselves, away from the borders."""
    parts = ["M " + " L ".join(f"{x / SIDE:.4f},{y / SIDE:.4f}" for x, y in ring) for ring in rings]
    path = " z ".join(parts) + " z"
    differ = ours(path) ^ drawn(path, BOX, SIDE, SIDE)
    borders = sum(
        np.hypot(*(np.subtract(a, b)))
        for ring in rings
        for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)
    )
    assert differ.sum() <= 0.25 * borders + 2, "at most a pixel in four of a border, as of a sliver"


def test_points_may_lie_anywhere():
    """Points may be apart, repeated, or outside the path."""
    square = np.array([(0, 0), (2.5, 0), (2.5, 3), (0, 3)])
    xs, ys = np.array([-1, 0.1, 0.1, 2.4, 2.6]), np.array([-0.1, 0.5, 2.9, 3.1, 9])
    assert outline_shapes.enclosed([square], xs, ys).astype(int).tolist() == [
        [0, 0, 0, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
    ]
    assert not outline_shapes.enclosed([square], xs + 9, ys).any()
    assert not outline_shapes.enclosed([], xs, ys).any()


def test_what_has_no_area_encloses_nothing():
    """No ring, a point, a line."""
    for path in ("M 0.5,0.5", "M 0.1,0.1 L 0.9,0.9", "M 0.1,0.1 L 0.9,0.9 z M 0.5,0.5 z"):
        assert not ours(path).any()
