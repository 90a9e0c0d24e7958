"""Fractions, pixels and paths."""

from __future__ import annotations

import itertools
import math

import pytest
from legato_client import Box, Detection, Outline, Point, PointedObject
from legato_client._svg_path import polygons


def test_to_pixels():
    """A fraction times the size is the pixel, for any size."""
    assert Point(0.5, 0.25).to_pixels(640, 480) == (320, 120)
    assert Box(0, 0.5, 1, 1).to_pixels(640, 480) == (0, 240, 640, 480)
    assert Detection(Box(0, 0, 1, 1), "a").to_pixels(3, 2) == (0, 0, 3, 2)
    assert PointedObject(Point(1, 1), "a").to_pixels(3, 2) == (3, 2)


@pytest.mark.parametrize(
    ("path", "rings"),
    [
        ("", ()),
        ("M 0 0 L 1 0 L 1 1 z", (((0, 0), (1, 0), (1, 1)),)),
        ("M0,0 1,0 1,1Z", (((0, 0), (1, 0), (1, 1)),)),
        ("m .5 .5 l .5 0 0 .5 z", (((0.5, 0.5), (1, 0.5), (1, 1)),)),
        ("M0 0H1V1H0V0z", (((0, 0), (1, 0), (1, 1), (0, 1)),)),
        ("M0 0h1v1h-1z", (((0, 0), (1, 0), (1, 1), (0, 1)),)),
        ("M0 0S0 1 1 0Q1 1 0 1z", (((0, 0), (1, 0), (0, 1)),)),
        (
            "M0 0L1 0L1 1zM.2.2L.4.2L.4.4z",
            (((0, 0), (1, 0), (1, 1)), ((0.2, 0.2), (0.4, 0.2), (0.4, 0.4))),
        ),
        ("M0 0L1 0L1 1zl.5 0 0 .5z", (((0, 0), (1, 0), (1, 1)), ((0, 0), (0.5, 0), (0.5, 0.5)))),
        ("M 0 0 L 1 1", ()),
    ],
)
def test_polygons(path, rings):
    """A path's rings are its corners, relative or absolute, most curves as chords."""
    assert polygons(path) == rings


@pytest.mark.parametrize(
    "path",
    [
        "M 1,0 C 1,.5523 .5523,1 0,1 C -.5523,1 -1,.5523 -1,0 z",
        "M 1,0 c 0,.5523 -.4477,1 -1,1 -.5523,0 -1,-.4477 -1,-1 z",
    ],
)
def test_cubic_curves_become_chords_between_points_on_them(path):
    """Half a circle of two curves: every corner of its ring is on it, none is far from the next."""
    (ring,) = polygons(path)
    assert [(round(x, 9), round(y, 9)) for x, y in ring[::8]] == [(1, 0), (0, 1), (-1, 0)]
    for (x, y), (next_x, next_y) in itertools.pairwise(ring):
        assert math.hypot(x, y) == pytest.approx(1, abs=1e-3)
        assert math.hypot(x - next_x, y - next_y) < 0.25


@pytest.mark.parametrize(
    "path", ["L 1 1", "M 0", "M 0 0 L 1", "1 2", "M 0 0 B 1 1", "M 0 0 z 1", "?"]
)
def test_not_a_path(path):
    """Text that is no path is refused."""
    with pytest.raises(ValueError, match="path"):
        polygons(path)


def test_outline_is_placed_in_its_box():
    """An outline's path is in fractions of its box; its polygons are in those of the image."""
    outline = Outline("M 0 0 L 1 0 L 1 1 z", Box(0.5, 0.5, 1.0, 0.75), "a")
    assert outline.polygons() == ((Point(0.5, 0.5), Point(1.0, 0.5), Point(1.0, 0.75)),)
