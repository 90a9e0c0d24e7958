"""Charts like those in reports: flat areas, axes and small text, reproducible by seed.

Coordinates are those of `Pen`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import math
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

# ---------------------------------------------------------------- pen

# A pen in units of an 850x600 image, whatever the size of the image that it draws on.
#
# It draws at twice the size and reduces, so that edges are soft.

INK = "#2b2b2b"
Point = tuple[float, float]
_UNITS = 850, 600
_FINER = 2


class Pen:
    """Draws on an image of `size` (width, height)."""

    def __init__(self, size: tuple[int, int], background: str) -> None:
        self._x, self._y = (_FINER * now / then for now, then in zip(size, _UNITS, strict=True))
        self._image = Image.new("RGB", (_FINER * size[0], _FINER * size[1]), background)
        self._draw = ImageDraw.Draw(self._image)

    def text(self, at: Point, text: str, size: float, color: str = INK, anchor: str = "mm") -> None:
        """Write text; `at` is its `anchor` by PIL's names, the middle by default."""
        font = _font(max(4, round(size * min(self._x, self._y))))
        self._draw.text(self._at(at), text, color, font, anchor=anchor)

    def line(self, points: Sequence[Point], color: str, width: float = 1.0) -> None:
        """Draw lines from point to point."""
        thick = max(1, round(width * min(self._x, self._y)))
        self._draw.line([self._at(each) for each in points], color, thick, joint="curve")

    def box(self, start: Point, end: Point, color: str) -> None:
        """Fill a box from `start`, the corner above and left of `end`."""
        (left, top), (right, bottom) = self._at(start), self._at(end)
        self._draw.rectangle((left, top, max(left, right), max(top, bottom)), color)

    def slice(self, centre: Point, radius: float, turns: tuple[float, float], color: str) -> None:
        """Fill a part of a disc, clockwise from `turns[0]` to `turns[1]`; 0 is to the right."""
        (x, y), reach = self._at(centre), radius * min(self._x, self._y)
        box = (x - reach, y - reach, x + reach, y + reach)
        self._draw.pieslice(box, 360 * turns[0], 360 * turns[1], color, "#ffffff", 2 * _FINER)

    def finished(self) -> Image.Image:
        """Return the image at the requested size."""
        return self._image.reduce(_FINER)

    def _at(self, point: Point) -> Point:
        return point[0] * self._x, point[1] * self._y


@functools.cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


# ---------------------------------------------------------------- charts

_LEFT, _TOP, _RIGHT, _BOTTOM = 84.0, 92.0, 828.0, 506.0  # of the area that data are drawn in
_PALETTES = (
    ("#2f6fb2", "#e07b39", "#5a9e4b", "#b8413b", "#7f62a8"),
    ("#0f2b5b", "#2d7dd2", "#97c1e8", "#8c8c8c", "#c03a2b"),
    ("#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e"),
    ("#3e4a61", "#f2b134", "#ed553b", "#06838f", "#a1c3d1"),
)
_BACKGROUNDS = ("#ffffff", "#ffffff", "#f7f7f5", "#eef3f8")
_FAINT, _GRID = "#6d6d6d", "#d9d9d9"
_SUBJECTS: tuple[str, ...] = (
    "Internet users",
    "Net revenue",
    "Coffee exports",
    "Unemployment",
    "Rail passengers",
)
_SUBJECTS += ("Life expectancy", "Electricity from wind", "New car registrations", "Museum visits")
_MEASURES = (
    "In millions",
    "In percent of the total",
    "In billion U.S. dollars",
    "Per 1,000 people",
)
_PLACES: tuple[str, ...] = (
    "Norway",
    "Kenya",
    "Brazil",
    "Japan",
    "Canada",
    "Spain",
    "Vietnam",
    "Poland",
    "Chile",
)
_PLACES += ("New Zealand", "South Korea", "Morocco")
_COMMON = {"columns": 4, "bars": 4, "lines": 3, "stacks": 2, "pie": 1}  # how often, of 14
_GROUPS = ("Total", "Men", "Women", "Under 25", "Over 65", "Urban", "Rural", "First quarter")


@dataclasses.dataclass(frozen=True, slots=True)
class Chart:
    """Data and style of a chart: `values_SK` of every series in every category."""

    kind: str  # one of `KINDS`
    title: str
    subtitle: str
    categories: tuple[str, ...]
    series: tuple[str, ...]
    values_SK: tuple[tuple[float, ...], ...]
    palette: tuple[str, ...]
    background: str
    labelled: bool  # with the value at every mark

    @property
    def top(self) -> float:
        """The highest value of a mark."""
        if self.kind == "stacks":
            return max(map(sum, zip(*self.values_SK, strict=True)))
        return max(map(max, self.values_SK))


class ChartMaker:
    """Draws charts; seed and index identify one."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def pixels(self, index: int, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
        """Return [H, W, C] of a chart of `size` (width, height), unique to its index."""
        return np.asarray(self._image(index, size))

    def jpeg(self, index: int, size: tuple[int, int], quality: int = 85) -> bytes:
        """Return the same as a JPEG file."""
        data = io.BytesIO()
        self._image(index, size).save(data, "JPEG", quality=quality)
        return data.getvalue()

    def _image(self, index: int, size: tuple[int, int]) -> Image.Image:
        return draw(invent(random.Random(f"{self._seed}/{index}")), size)


def invent(rng: random.Random) -> Chart:
    """Invent the figures of a chart."""
    (kind,) = rng.choices(list(_COMMON), list(_COMMON.values()))
    num_series = 1 if kind == "pie" else rng.randint(1, 4)
    if kind == "lines" or (kind != "pie" and rng.random() < 0.5):
        first = rng.randint(1995, 2012)
        categories = tuple(str(first + step) for step in range(rng.randint(5, 12)))
    else:
        categories = tuple(rng.sample(_PLACES, rng.randint(3, 8 if kind != "pie" else 5)))
    scale = 10 ** rng.uniform(1, 3.5)
    values_SK = []
    for _ in range(num_series):
        level = rng.uniform(0.3, 1.0)
        walk = [level := abs(level + rng.gauss(0, 0.12)) for _ in categories]
        values_SK.append(tuple(round(scale * each + 0.1, 1) for each in walk))
    among = "year" if categories[0].isdigit() else "country"
    return Chart(
        kind=kind,
        title=f"{rng.choice(_SUBJECTS)} by {among}, survey of {rng.randint(2013, 2024)}",
        subtitle=rng.choice(_MEASURES),
        categories=categories,
        series=tuple(rng.sample(_GROUPS, num_series)),
        values_SK=tuple(values_SK),
        palette=rng.choice(_PALETTES),
        background=rng.choice(_BACKGROUNDS),
        labelled=kind == "pie" or num_series * len(categories) <= 16,
    )


def draw(chart: Chart, size: tuple[int, int]) -> Image.Image:
    """Draw the chart as an RGB image of `size` (width, height)."""
    pen = Pen(size, chart.background)
    pen.text((_LEFT - 60, 22), chart.title, 23, anchor="lm")
    pen.text((_LEFT - 60, 50), chart.subtitle, 15, _FAINT, anchor="lm")
    KINDS[chart.kind](pen, chart)
    names = chart.categories if chart.kind == "pie" else chart.series
    if len(names) > 1:
        _legend(pen, names, chart.palette)
    pen.text((_LEFT - 60, 584), "Source: made up; figures of no country", 12, _FAINT, anchor="lm")
    return pen.finished()


def ticks(top: float) -> list[float]:
    """Return evenly spaced round numbers from 0, the last one at or above `top` > 0."""
    magnitude = 10.0 ** math.floor(math.log10(top / 5))
    step = next(each * magnitude for each in (1, 2, 2.5, 5, 10) if each * magnitude * 6 >= top)
    return [step * place for place in range(math.ceil(top / step) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _legend(pen: Pen, names: Sequence[str], palette: Sequence[str]) -> None:
    for place, (name, color) in enumerate(zip(names, palette, strict=False)):
        x = _LEFT + 150 * place
        pen.box((x, 551), (x + 13, 564), color)
        pen.text((x + 19, 558), name, 14, anchor="lm")


# ---------------------------------------------------------------- kinds


def _upright(pen: Pen, chart: Chart) -> tuple[Callable[[float], float], list[float]]:
    """Draw axes with values upwards; return the height of a value and the x of each category."""
    marks = ticks(chart.top)

    def height(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * value / marks[-1]

    for mark in marks:
        y = height(mark)
        pen.line([(_LEFT, y), (_RIGHT, y)], _GRID if mark else INK)
        pen.text((_LEFT - 8, y), _number(mark), 14, _FAINT, anchor="rm")
    apart = (_RIGHT - _LEFT) / len(chart.categories)
    middles = [_LEFT + apart * (place + 0.5) for place in range(len(chart.categories))]
    for x, name in zip(middles, chart.categories, strict=True):
        pen.line([(x, _BOTTOM), (x, _BOTTOM + 5)], INK)
        pen.text((x, _BOTTOM + 17), name, 14 if apart > 90 else 12)
    return height, middles


def _columns(pen: Pen, chart: Chart) -> None:
    height, middles = _upright(pen, chart)
    wide = 0.72 * (middles[1] - middles[0]) / len(chart.series)
    for nth, (values_K, color) in enumerate(zip(chart.values_SK, chart.palette, strict=False)):
        for middle, value in zip(middles, values_K, strict=True):
            x, y = middle + wide * (nth - len(chart.series) / 2), height(value)
            pen.box((x, y), (x + 0.92 * wide, _BOTTOM), color)
            if chart.labelled:
                pen.text((x + wide / 2, y - 9), _number(value), 12)


def _stacks(pen: Pen, chart: Chart) -> None:
    height, middles = _upright(pen, chart)
    wide = 0.6 * (middles[1] - middles[0])
    for middle, values_S in zip(middles, zip(*chart.values_SK, strict=True), strict=True):
        below = 0.0
        for value, color in zip(values_S, chart.palette, strict=False):
            low, high = height(below), height(below + value)
            pen.box((middle - wide / 2, high), (middle + wide / 2, low), color)
            if chart.labelled and low - high > 16:
                pen.text((middle, (low + high) / 2), _number(value), 12, "#ffffff")
            below += value


def _bars(pen: Pen, chart: Chart) -> None:
    """Draw values to the right, categories below each other."""
    left, marks = _LEFT + 40, ticks(chart.top)
    each = (_BOTTOM - _TOP) / len(chart.categories)
    thick = 0.74 * each / len(chart.series)
    for mark in marks:
        x = left + (_RIGHT - left) * mark / marks[-1]
        pen.line([(x, _TOP), (x, _BOTTOM)], _GRID if mark else INK)
        pen.text((x, _BOTTOM + 17), _number(mark), 14, _FAINT)
    for place, name in enumerate(chart.categories):
        middle = _TOP + each * (place + 0.5)
        pen.text((left - 8, middle), name, 14, anchor="rm")
        for nth, (values_K, color) in enumerate(zip(chart.values_SK, chart.palette, strict=False)):
            x = left + (_RIGHT - left) * values_K[place] / marks[-1]
            y = middle + thick * (nth - len(chart.series) / 2)
            pen.box((left, y), (x, y + 0.9 * thick), color)
            if chart.labelled:
                pen.text((x + 5, y + thick / 2), _number(values_K[place]), 12, anchor="lm")


def _lines(pen: Pen, chart: Chart) -> None:
    height, middles = _upright(pen, chart)
    for values_K, color in zip(chart.values_SK, chart.palette, strict=False):
        points = [(x, height(value)) for x, value in zip(middles, values_K, strict=True)]
        pen.line(points, color, 2.5)
        for (x, y), value in zip(points, values_K, strict=True):
            pen.slice((x, y), 5, (0, 1), color)
            if chart.labelled:
                pen.text((x, y - 13), _number(value), 12)


def _pie(pen: Pen, chart: Chart) -> None:
    values_K, begin = chart.values_SK[0], 0.75
    centre, radius = ((_LEFT + _RIGHT) / 2, (_TOP + _BOTTOM) / 2), 185.0
    for value, color in zip(values_K, chart.palette, strict=False):
        share = value / sum(values_K)
        pen.slice(centre, radius, (begin, begin + share), color)
        angle = 2 * math.pi * (begin + share / 2)
        at = (centre[0] + 218 * math.cos(angle), centre[1] + 218 * math.sin(angle))
        pen.text(at, f"{share:.1%}", 15)
        begin += share


KINDS: dict[str, Callable[[Pen, Chart], None]] = {
    "columns": _columns,
    "stacks": _stacks,
    "bars": _bars,
    "lines": _lines,
    "pie": _pie,
}


# ---------------------------------------------------------------- files
# The images of the benchmarks, charts or photographs, as JPEG files.
#
# Charts are what published figures of other systems are of (ChartQA). Photographs are three
# times as many bytes, and their details draw more power.


# ---------------------------------------------------------------- photographs

# Images that decode and compress like photographs, reproducible by seed.
#
# Shape legend: S side of a canvas, H, W and C rows, columns and channels of an image.

Array = npt.NDArray[np.float32]

_LUMA_STD, _CHROMA_STD, _MEAN = 52.0, 14.0, 118.0
_LENS = 0.2  # cycles a pixel at which a lens passes 1/e of the contrast
_START, _COMMENT = b"\xff\xd8", b"\xff\xfe"
# Columns are R, G, B of the three components: brightness, blue against yellow, red against cyan.
_TO_RGB_CC = np.array([[1.0, 1.0, 1.0], [0.0, -0.34, 1.77], [1.4, -0.71, 0.0]], np.float32)


class Photographer:
    """Cuts windows from one canvas of 1/f noise, whose amplitudes fall as those of scenes do.

    `largest` is the longest side of any image to come.
    """

    def __init__(self, seed: int, largest: int) -> None:
        side = max(2048, 1 << largest.bit_length())
        self._seed = seed
        self._canvas_SS = _pink_noise(np.random.default_rng(seed), side)

    def pixels(self, index: int, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
        """Return [H, W, C] of an image of `size` (width, height), unique to its index."""
        width, height = size
        rng = np.random.default_rng((self._seed, index))
        side = len(self._canvas_SS)
        components = []
        for std in (_LUMA_STD, _CHROMA_STD, _CHROMA_STD):
            top, left = rng.integers(0, side, 2)
            rows_H, columns_W = (top + np.arange(height)) % side, (left + np.arange(width)) % side
            components.append(std * self._canvas_SS[np.ix_(rows_H, columns_W)])
        mixed_HWC = np.stack(components, axis=-1) @ _TO_RGB_CC + _MEAN
        pixels_HWC: npt.NDArray[np.uint8] = np.clip(mixed_HWC, 0, 255).astype(np.uint8)
        return pixels_HWC

    def jpeg(self, index: int, size: tuple[int, int], quality: int = 85) -> bytes:
        """Return the same as a JPEG file."""
        data = io.BytesIO()
        Image.fromarray(self.pixels(index, size)).save(data, "JPEG", quality=quality)
        return data.getvalue()


def stamped(jpeg: bytes, serial: int) -> bytes:
    """Change the content hash by a comment of 8 bytes that holds `serial`.

    The receiver has to decode the image like any other, because only its bytes differ.
    """
    comment = struct.pack(">HQ", 2 + 8, serial)
    return b"".join((_START, _COMMENT, comment, jpeg[len(_START) :]))


def _pink_noise(rng: np.random.Generator, side: int) -> Array:
    """Return [S, S] of mean 0 and variance 1, periodic in both directions."""
    spectrum_SF = np.fft.rfft2(rng.standard_normal((side, side), dtype=np.float32))
    distance_SF = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None, :])
    distance_SF[0, 0] = np.inf  # no brightness of its own
    lens_SF = np.exp(-((distance_SF / _LENS) ** 2))
    canvas_SS = np.fft.irfft2(spectrum_SF * lens_SF / distance_SF, s=(side, side))
    even_SS: Array = (canvas_SS / canvas_SS.std()).astype(np.float32)
    return even_SS


# ---------------------------------------------------------------- files

PHOTO, CHART = "photo", "chart"


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add `--pictures`, which selects charts or photographs."""
    parser.add_argument("--pictures", choices=(PHOTO, CHART), default=CHART, help="what they show")


def jpegs(kind: str, count: int, size: tuple[int, int], seed: int = 0) -> list[bytes]:
    """Return different images of `size` (width, height), reproducible by seed."""
    maker = ChartMaker(seed) if kind == CHART else Photographer(seed, max(size))
    return [maker.jpeg(index, size) for index in range(count)]
