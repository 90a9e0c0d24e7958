"""The refiner's input from an outline, and the outline of its result."""

import numpy as np
import pytest
from legato_engine.models.moondream import refiner
from legato_engine.models.moondream.refiner import Crop, NotRefinable
from legato_engine.types import Box, Outline
from PIL import Image

from tests.engine.models.moondream.outlines.shapes import SHAPES, SIDE, drawn, overlap

S = 56
WHOLE = Box(x_min=0, y_min=0, x_max=1, y_max=1)
SQUARE = "M 0,0 L 1,0 L 1,1 L 0,1 Z"
MIDDLE = Box(x_min=0.4, y_min=0.4, x_max=0.6, y_max=0.6)


def outline(path=SQUARE, box=MIDDLE):
    """A coarse outline."""
    return Outline(path=path, box=box, label="cup")


def noise_image(height=100, width=200):
    """Noise."""
    random = np.random.default_rng(3)
    return random.integers(0, 256, (height, width, 3), dtype=np.uint8)


def placed(size, left, top, extent=(S, S)):
    """A crop of which only the position is read."""
    seen = np.zeros((S, S, 3), np.uint8)
    return Crop(size, left, top, extent, seen, seen[..., 0])


def whole(mask, side=S):
    """A crop of a whole image with this mask, and the mask as a result of `side`."""
    return placed(mask.shape, 0, 0, mask.shape), refiner.resized(
        mask.astype(np.float32), (side, side)
    )


def test_the_crop_is_the_box_with_a_quarter_of_it_on_each_side():
    """In pixels of the image, whatever its proportions."""
    made = refiner.cut(outline(), noise_image(), S)
    assert (made.size, made.left, made.top, made.extent) == ((100, 200), 70, 35, (30, 60))
    assert made.pixels_SSC.shape == (S, S, 3)
    assert made.mask_SS.shape == (S, S)


def test_a_crop_ends_with_the_image():
    """A box at the edge has no margin there."""
    made = refiner.cut(outline(box=Box(x_min=0, y_min=0.5, x_max=0.5, y_max=1)), noise_image(), S)
    assert (made.left, made.top, made.extent) == (0, 37, (63, 125))


def test_the_mask_is_what_the_path_encloses():
    """The box fills the middle two thirds of its crop, and a hole in a path is a hole."""
    mask = refiner.cut(outline(), noise_image(300, 300), 90).mask_SS
    expected = np.zeros((90, 90), np.uint8)
    expected[15:75, 15:75] = 1
    assert np.array_equal(mask, expected)
    holed = SQUARE + " M 0.3,0.3 L 0.3,0.7 L 0.7,0.7 L 0.7,0.3 Z"
    mask = refiner.cut(outline(holed), noise_image(300, 300), 90).mask_SS
    assert mask[45, 45] == 0
    assert mask[20, 20] == 1


def test_relative_commands_and_curves_are_drawn():
    """The whole grammar of paths is drawn."""
    path = "m 0.5,0 c 0.28,0 0.5,0.22 0.5,0.5 s -0.22,0.5 -0.5,0.5 q -0.5,0 -0.5,-0.5 t 0.5,-0.5 z"
    mask = refiner.cut(outline(path, WHOLE), noise_image(60, 60), 60).mask_SS
    assert 0.75 < mask.mean() < 0.85  # a disc's share is 0.79, and one quarter bulges
    assert mask[30, 30]
    assert not mask[0, 0]


def test_of_a_large_crop_only_what_is_seen_is_drawn():
    """Of a large crop only sampled pixels are drawn, each if covered by more than half."""
    triangle = outline("M 0,0 L 1,0 L 0,1 z", WHOLE)
    large = np.broadcast_to(np.uint8(7), (3000, 3000, 3))
    seen = np.arange(S) * 3000 // S
    place = np.add.outer(seen, seen)  # of 2999: the border runs through it
    mask = refiner.cut(triangle, large, S).mask_SS
    assert np.array_equal(mask[place != 2999], place[place != 2999] < 2999)


@pytest.mark.parametrize(
    ("path", "box"),
    [
        (SQUARE, Box(x_min=0.5, y_min=0.5, x_max=0.5, y_max=0.5)),
        ("M 0,0 L 1,1 z", MIDDLE),
        ("M 0.5,0.5", MIDDLE),
    ],
)
def test_what_encloses_nothing_is_not_refinable(path, box):
    """A box without extent, a line, a point."""
    with pytest.raises(NotRefinable, match=r"is empty|nothing"):
        refiner.cut(outline(path, box), noise_image(), S)


@pytest.mark.parametrize("size", [(7, 9), (56, 56), (150, 40)])
def test_interpolation_is_linear_between_middles(size):
    """It is like Pillow's without antialiasing, and exact on a plane."""
    values = np.random.default_rng(0).random((50, 30)).astype(np.float32)
    expected = Image.fromarray(values).resize((90, 100), Image.Resampling.BILINEAR)
    assert np.allclose(refiner.resized(values, (100, 90)), np.asarray(expected), atol=1e-5)
    y, x = np.mgrid[:50, :30].astype(np.float32) + 0.5
    plane = refiner.resized(2 * y + 3 * x, size)
    rows, columns = np.mgrid[: size[0], : size[1]] + 0.5
    exact = 2 * rows * 50 / size[0] + 3 * columns * 30 / size[1]
    inner = (slice(size[0] // 10 + 1, -size[0] // 10), slice(size[1] // 10 + 1, -size[1] // 10))
    assert np.allclose(plane[inner], exact[inner], atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_result_becomes_an_outline_of_the_same_shape(shape):
    """Resizing, cleaning and tracing keep the shape, in the new box."""
    mask = SHAPES[shape]()
    made = refiner.outlined("cup", *whole(mask, side=SIDE))
    assert (made.label, made.coarse) == ("cup", False)
    box = (made.box.x_min, made.box.y_min, made.box.x_max, made.box.y_max)
    assert overlap(mask, drawn(made.path, box, SIDE, SIDE)) > 0.97


def test_the_box_has_all_pixels_of_the_mask_and_no_others():
    """Its edges are those of the outermost pixels, in fractions of the image."""
    answer = np.zeros((S, S), np.float32)
    answer[10:30, 20:50] = 1
    made = refiner.outlined("cup", placed((200, 100), 4, 8), answer)
    assert made.box == Box(x_min=24 / 100, y_min=18 / 200, x_max=54 / 100, y_max=38 / 200)
    for number in made.path.replace(",", " ").split():
        assert number in "MLCz" or -0.01 <= float(number) <= 1.01


def test_a_large_crop_is_traced_no_finer_than_it_was_seen():
    """Its box and path are those of a small crop, in fractions of the image."""
    answer = refiner.resized(SHAPES["disc"]().astype(np.float32), (S, S))
    small = refiner.outlined("cup", placed((2 * S, 2 * S), 0, 0, (2 * S, 2 * S)), answer)
    large = refiner.outlined("cup", placed((40 * S, 80 * S), 0, 0, (40 * S, 80 * S)), answer)
    assert large == small


@pytest.mark.parametrize(
    ("value", "problem"), [(0.0, "empty"), (0.5, "empty"), (float("nan"), "not finite")]
)
def test_an_answer_without_a_mask_is_no_outline(value, problem):
    """A result below one half everywhere, or not finite, is refused."""
    answer = np.full((S, S), value, np.float32)
    with pytest.raises(NotRefinable, match=problem):
        refiner.outlined("cup", placed((S, S), 0, 0), answer)
