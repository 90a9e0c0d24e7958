"""Outlines as crops, rings, curves and SVG paths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legato_engine.models.moondream import outline_shapes, refiner
from legato_engine.models.moondream.refiner import Crop, NotRefinable
from legato_engine.types import ImageBox, MaskOutline
from PIL import Image

from tests.engine.models.moondream.refiner.shapes import SHAPES, SIDE, disc, drawn, overlap, star

# ---------------------------------------------------------------- crop
# The refiner's input from an outline, and the outline of its result.

S = 56
WHOLE = ImageBox(x_min=0, y_min=0, x_max=1, y_max=1)
SQUARE = "M 0,0 L 1,0 L 1,1 L 0,1 Z"
MIDDLE = ImageBox(x_min=0.4, y_min=0.4, x_max=0.6, y_max=0.6)


def outline(path=SQUARE, box=MIDDLE):
    """A coarse outline."""
    return MaskOutline(path=path, box=box, label="cup")


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
    made = refiner.cut(
        outline(box=ImageBox(x_min=0, y_min=0.5, x_max=0.5, y_max=1)), noise_image(), S
    )
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
        (SQUARE, ImageBox(x_min=0.5, y_min=0.5, x_max=0.5, y_max=0.5)),
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
    assert made.box == ImageBox(x_min=24 / 100, y_min=18 / 200, x_max=54 / 100, y_max=38 / 200)
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


# ---------------------------------------------------------------- rings

masks = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 1 << 30)).map(
    lambda drawn: np.random.default_rng(drawn[2]).random(drawn[:2]) < 0.5
)


@settings(max_examples=200, deadline=None)
@given(mask=masks)
def test_rings_enclose_exactly_their_mask(mask):
    """Filling all rings gives the mask, and their areas add up to it."""
    found = outline_shapes.trace(mask)
    ys, xs = (np.arange(count) + 0.5 for count in mask.shape)
    assert np.array_equal(outline_shapes.enclosed(found, xs, ys), mask)
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


# ---------------------------------------------------------------- curves

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


# ---------------------------------------------------------------- paths
# SVG paths to masks, compared with a renderer.

PATH_SIDE = 160
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
    middles = np.arange(PATH_SIDE, dtype=np.float64) + 0.5
    rings = [(ring + SHIFT) * PATH_SIDE for ring in outline_shapes.polygons(path)]
    return outline_shapes.enclosed(rings, middles, middles)


@pytest.mark.parametrize("name", PATHS)
def test_every_command_draws_what_a_renderer_draws(name):
    """The whole grammar, in either case, except at the border."""
    path = PATHS[name]
    assert overlap(ours(path), drawn(path, BOX, PATH_SIDE, PATH_SIDE)) > 0.985


places = st.lists(
    st.tuples(st.integers(-20, 180), st.integers(-20, 180)), min_size=3, max_size=7, unique=True
)


@settings(max_examples=60, deadline=None)
@given(rings=st.lists(places, min_size=1, max_size=3))
def test_polygons_are_filled_as_a_renderer_fills_them(rings):
    """Polygons that cross each other and themselves, away from the borders."""
    parts = [
        "M " + " L ".join(f"{x / PATH_SIDE:.4f},{y / PATH_SIDE:.4f}" for x, y in ring)
        for ring in rings
    ]
    path = " z ".join(parts) + " z"
    differ = ours(path) ^ drawn(path, BOX, PATH_SIDE, PATH_SIDE)
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
