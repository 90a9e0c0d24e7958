"""A pen in units of an 850x600 image, whatever the size of the image that it draws on.

It draws at twice the size and reduces, so that edges are soft.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont

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
