"""Annotated images, and the geometry that they are drawn from."""

from __future__ import annotations

import io
import itertools
import math

import numpy as np
import pytest
from legato_client import (
    Box,
    CachedImage,
    CaptionResult,
    Detection,
    DetectResult,
    FrameResult,
    FrameStamp,
    InternalError,
    Outline,
    Point,
    PointedObject,
    RawFrame,
    ResponseInfo,
)
from legato_client._images.pillow import open_upright
from legato_client._svg_path import polygons
from legato_client.draw import PALETTE, annotate, marks_of
from PIL import Image

SIZE = 800


def changed(image: Image.Image, x: float, y: float) -> bool:
    """Whether the white ground shows a mark at this place."""
    return image.getpixel((round(x * SIZE), round(y * SIZE))) != (255, 255, 255)


@pytest.fixture
def ground() -> Image.Image:
    """A white image."""
    return Image.new("RGB", (SIZE, SIZE), "white")


def test_box(ground):
    """A box is drawn along its edges and leaves its inside and the outside alone."""
    image = annotate(ground, [Detection(Box(0.25, 0.25, 0.75, 0.75), "")])
    for place in ((0.25, 0.5), (0.75, 0.5), (0.5, 0.25), (0.5, 0.75)):
        assert changed(image, *place)
    assert not changed(image, 0.5, 0.5)
    assert not changed(image, 0.1, 0.5)


def test_point(ground):
    """A point's centre has its label's colour."""
    image = annotate(ground, [PointedObject(Point(0.5, 0.5), "a")])
    assert image.getpixel((SIZE // 2, SIZE // 2)) == PALETTE[0]
    assert not changed(image, 0.2, 0.2)


def test_outline(ground):
    """An outline shades its inside, not the rest of its box."""
    triangle = Outline("M 0 0 L 1 0 L 0 1 z", Box(0.2, 0.2, 0.8, 0.8), "")
    image = annotate(ground, [triangle])
    assert changed(image, 0.3, 0.3)
    assert not changed(image, 0.7, 0.7)


def test_unreadable_outline(ground):
    """An outline whose path cannot be read shows its box."""
    image = annotate(ground, [Outline("what", Box(0.2, 0.2, 0.8, 0.8), "")])
    assert changed(image, 0.2, 0.5)
    assert not changed(image, 0.5, 0.5)


def test_labels(ground):
    """A label is written at its box, inside the image even for a box at the edge."""
    image = annotate(ground, [Detection(Box(0, 0, 1, 1), "cat")])
    assert changed(image, 0.02, 0.02)
    assert image.size == (SIZE, SIZE)


def test_colours(ground):
    """Marks of one label share a colour; another label has another."""
    marks = [
        PointedObject(Point(0.2, 0.5), "a"),
        PointedObject(Point(0.5, 0.5), "b"),
        PointedObject(Point(0.8, 0.5), "a"),
    ]
    image = annotate(ground, marks)
    colours = [image.getpixel((round(x * SIZE), SIZE // 2)) for x in (0.2, 0.5, 0.8)]
    assert colours[0] == colours[2] != colours[1]


def test_text_panel(ground):
    """Lines of text make the image taller and leave the image itself alone."""
    image = annotate(ground, lines=["a cat " * 60])
    assert image.width == SIZE
    assert image.height > SIZE + 40
    assert not changed(image, 0.5, 0.5)


def test_small_images_are_enlarged():
    """A small image grows by a whole factor, so that labels do not cover it."""
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


INFO = ResponseInfo("r", "m", "stop")
CAT = Detection(Box(0, 0, 1, 1), "cat")


def test_a_result_is_drawn_as_its_marks(ground):
    """A result, or a frame's, may stand for its marks."""
    expected = annotate(ground, [CAT]).tobytes()
    result = DetectResult((CAT,), INFO)
    assert annotate(ground, result).tobytes() == expected
    framed = FrameResult(FrameStamp(), "", result, None, True)
    assert annotate(ground, framed).tobytes() == expected


@pytest.mark.parametrize(
    ("outcome", "marks"),
    [
        (DetectResult((CAT,), INFO), (CAT,)),
        (CaptionResult("a cat", INFO), ()),
        (InternalError("bug"), ()),
    ],
)
def test_marks_of_a_session(outcome, marks):
    """An answer of a session has the marks of its result; a failed task has none."""
    assert marks_of(FrameResult(FrameStamp(), "", outcome, None, True)) == marks


RED, GREEN = (81, 90, 240), (145, 54, 34)  # Y, U, V in BT.601, limited range


def planes(height: int, width: int) -> list[np.ndarray]:
    """Y, U and V of an image that is red on the left and green on the right."""
    left = np.arange(width) < width // 2
    return [np.tile(np.where(left, *pair), (height, 1)) for pair in zip(RED, GREEN, strict=True)]


def frame_of(name: str) -> RawFrame:
    """The red and green image, 8 by 4, in a format with padded rows."""
    y, u, v = (plane.astype(np.uint8) for plane in planes(4, 8))
    if name == "nv12":
        chroma = np.stack([u[::2, ::2], v[::2, ::2]], -1).reshape(2, 8)
        rows = np.vstack([y, chroma])
    else:
        chroma = np.stack([u[:, ::2], v[:, ::2]], -1).reshape(4, 8)
        rows = np.stack([y, chroma], -1).reshape(4, 16)
    stride = rows.shape[1] + 4
    padded = np.pad(rows, ((0, 0), (0, 4))).tobytes()[:-4]
    return RawFrame(padded, 8, 4, name, stride)  # type: ignore[arg-type] # one of two names


@pytest.mark.parametrize("name", ["nv12", "yuyv"])
def test_camera_frames(name):
    """A camera's frame is drawn on in its true colours, whatever pads its rows."""
    image = open_upright(frame_of(name))
    assert image.size == (8, 4)
    for x, colour in ((0, (255, 0, 0)), (7, (0, 255, 0))):
        shown = image.getpixel((x, 3))
        assert isinstance(shown, tuple)
        assert max(abs(a - b) for a, b in zip(shown, colour, strict=True)) <= 4


@pytest.mark.parametrize(
    ("name", "pixel"),
    [("rgb8", (1, 2, 3)), ("bgr8", (3, 2, 1)), ("rgba8", (1, 2, 3, 9)), ("bgra8", (3, 2, 1, 9))],
)
def test_packed_frames(name, pixel):
    """The order of a frame's channels is respected."""
    image = open_upright(RawFrame(bytes(pixel * 6), 3, 2, name))
    assert image.getpixel((2, 1)) == (1, 2, 3)
    mono = open_upright(RawFrame(bytes(6), 3, 2, "mono8"))
    assert mono.getpixel((2, 1)) == (0, 0, 0)


# ---------------------------------------------------------------- geometry


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
