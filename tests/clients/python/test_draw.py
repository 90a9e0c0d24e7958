"""Annotated pictures."""

from __future__ import annotations

import io

import numpy as np
import pytest
from legato_client import Box, CachedImage, Detection, Outline, Point, PointedObject
from legato_client.draw import PALETTE, annotate
from PIL import Image

SIZE = 800


def changed(picture: Image.Image, x: float, y: float) -> bool:
    """Whether the white ground shows a mark at this place."""
    return picture.getpixel((round(x * SIZE), round(y * SIZE))) != (255, 255, 255)


@pytest.fixture
def ground() -> Image.Image:
    """A white picture."""
    return Image.new("RGB", (SIZE, SIZE), "white")


def test_box(ground):
    """A box is drawn along its edges and leaves its inside and the outside alone."""
    picture = annotate(ground, [Detection(Box(0.25, 0.25, 0.75, 0.75), "")])
    for place in ((0.25, 0.5), (0.75, 0.5), (0.5, 0.25), (0.5, 0.75)):
        assert changed(picture, *place)
    assert not changed(picture, 0.5, 0.5)
    assert not changed(picture, 0.1, 0.5)


def test_point(ground):
    """A point's centre has its label's colour."""
    picture = annotate(ground, [PointedObject(Point(0.5, 0.5), "a")])
    assert picture.getpixel((SIZE // 2, SIZE // 2)) == PALETTE[0]
    assert not changed(picture, 0.2, 0.2)


def test_outline(ground):
    """An outline shades its inside, not the rest of its box."""
    triangle = Outline("M 0 0 L 1 0 L 0 1 z", Box(0.2, 0.2, 0.8, 0.8), "")
    picture = annotate(ground, [triangle])
    assert changed(picture, 0.3, 0.3)
    assert not changed(picture, 0.7, 0.7)


def test_unreadable_outline(ground):
    """An outline whose path cannot be read shows its box."""
    picture = annotate(ground, [Outline("what", Box(0.2, 0.2, 0.8, 0.8), "")])
    assert changed(picture, 0.2, 0.5)
    assert not changed(picture, 0.5, 0.5)


def test_labels(ground):
    """A label is written at its box, inside the picture even for a box at the edge."""
    picture = annotate(ground, [Detection(Box(0, 0, 1, 1), "cat")])
    assert changed(picture, 0.02, 0.02)
    assert picture.size == (SIZE, SIZE)


def test_colours(ground):
    """Marks of one label share a colour; another label has another."""
    marks = [
        PointedObject(Point(0.2, 0.5), "a"),
        PointedObject(Point(0.5, 0.5), "b"),
        PointedObject(Point(0.8, 0.5), "a"),
    ]
    picture = annotate(ground, marks)
    colours = [picture.getpixel((round(x * SIZE), SIZE // 2)) for x in (0.2, 0.5, 0.8)]
    assert colours[0] == colours[2] != colours[1]


def test_text_panel(ground):
    """Lines of text make the picture taller and leave the picture itself alone."""
    picture = annotate(ground, lines=["a cat " * 60])
    assert picture.width == SIZE
    assert picture.height > SIZE + 40
    assert not changed(picture, 0.5, 0.5)


def test_small_pictures_are_enlarged():
    """A small picture grows by a whole factor, so that labels do not cover it."""
    assert annotate(Image.new("RGB", (200, 100))).size == (600, 300)


def test_sources(ground):
    """Files' bytes and arrays can be drawn on; the argument itself is never changed."""
    buffer = io.BytesIO()
    ground.save(buffer, format="PNG")
    mark = [Detection(Box(0.25, 0.25, 0.75, 0.75), "")]
    expected = annotate(ground, mark).tobytes()
    assert annotate(buffer.getvalue(), mark).tobytes() == expected
    assert annotate(np.asarray(ground), mark).tobytes() == expected
    assert not changed(ground, 0.25, 0.5)
    with pytest.raises(TypeError, match="cached"):
        annotate(CachedImage("i"))
