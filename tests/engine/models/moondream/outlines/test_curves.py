"""Curves fitted to rings."""

import numpy as np
import pytest
from legato_engine.models.moondream import outline_shapes

from tests.engine.models.moondream.outlines.shapes import SHAPES, disc, drawn, overlap, star

TOLERANCE = 0.75


def text(curve):
    """Its SVG path in pixels."""

    def place(points):
        return " ".join(f"{x},{y}" for x, y in points)

    strokes = (f"{'L' if s.is_line else 'C'} {place(s.points)}" for s in curve.strokes)
    return " ".join([f"M {place([curve.start])}", *strokes, "z"])


def traced(mask, tolerance=TOLERANCE):
    """A mask's curves, and a renderer's mask of them."""
    found = [outline_shapes.fit(ring, tolerance) for ring in outline_shapes.trace(mask)]
    height, width = mask.shape
    unit = (0.0, 0.0, 1 / width, 1 / height)
    return found, drawn(" ".join(map(text, found)), unit, width, height)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_survives_tracing(shape):
    """The drawn curve differs only at the border, and has few strokes."""
    mask = SHAPES[shape]()
    found, again = traced(mask)
    assert overlap(mask, again) > 0.985
    assert sum(len(curve.strokes) for curve in found) < 60


def test_corners_stay_corners_and_edges_lines():
    """A star is mostly lines, a disc has none."""
    (of_star,), _ = traced(star())
    (of_disc,), _ = traced(disc())
    assert sum(stroke.is_line for stroke in of_star.strokes) >= 10
    assert not any(stroke.is_line for stroke in of_disc.strokes)


@pytest.mark.parametrize("tolerance", [0.5, 1.0, 3.0])
def test_a_curve_stays_within_its_tolerance(tolerance):
    """No border point is farther from a stroke than the tolerance and half a pixel."""
    ring = outline_shapes.trace(SHAPES["wavy"]())[0]
    curve = outline_shapes.fit(ring, tolerance)
    places, start = [], curve.start
    where = np.linspace(0, 1, 200)[:, None]
    for stroke in curve.strokes:
        ends = np.vstack([start, stroke.points])
        while len(ends) > 1 and len(ends) != 4:  # a line is a curve with its handles on it
            ends = np.linspace(ends[0], ends[-1], 4)
        a, b, c, d = ends
        u, v = where, 1 - where
        places.append(v**3 * a + 3 * u * v**2 * b + 3 * u**2 * v * c + u**3 * d)
        start = stroke.points[-1]
    on = np.concatenate(places)
    away = np.hypot(*(ring[:, None] - on[None]).transpose(2, 0, 1)).min(axis=1)
    assert away.max() < tolerance + 0.75


@pytest.mark.parametrize("extent", [(1, 1), (1, 7), (2, 2), (3, 5)])
def test_tiny_rings_have_curves_too(extent):
    """Every ring has at least two strokes and ends where it began."""
    (ring,) = outline_shapes.trace(np.ones(extent, bool))
    curve = outline_shapes.fit(ring, TOLERANCE)
    assert len(curve.strokes) >= 2
    assert np.allclose(curve.strokes[-1].points[-1], curve.start)


def test_the_same_ring_gives_the_same_curve():
    """Curves are equal to the last digit."""
    assert [text(c) for c in traced(star())[0]] == [text(c) for c in traced(star())[0]]
