"""An image in characters: each is two pixels, one above the other. Needs Pillow and rich."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from PIL import Image, ImageDraw
from rich.color import Color
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style

from legato_client import Detection, Outline, PointedObject
from legato_client._types.results import Mark
from legato_client.draw import FAINT, PALETTE

_LEAST = (24, 6)  # characters, below which nothing could be made out


class HalfBlocks:
    """Drawn by rich in `columns` x `rows` characters or fewer, in the image's own shape."""

    def __init__(
        self,
        image: Image.Image,
        marks: Iterable[Mark],
        columns: int,
        rows: int,
        faint: Iterable[Mark] = (),
    ) -> None:
        """Scale the image to `columns` and `rows`, which pass `fits`; draw `faint` marks below."""
        scale = min(columns / image.width, 2 * rows / image.height)
        width = max(1, round(image.width * scale))
        height = max(2, round(image.height * scale) // 2 * 2)
        self._image = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
        shown, below = list(marks), list(faint)
        labels = list(dict.fromkeys(mark.label for mark in (*shown, *below)))
        behind = self._image.copy()
        _draw(behind, below, labels)
        self._image = Image.blend(self._image, behind, FAINT)
        _draw(self._image, shown, labels)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, pixels = self._image.width, self._image.tobytes()
        rgb = [pixels[start : start + 3] for start in range(0, len(pixels), 3)]
        for top in range(0, len(rgb), 2 * width):
            middle, end = top + width, top + 2 * width
            pairs = zip(rgb[top:middle], rgb[middle:end], strict=True)
            for (upper, lower), same in itertools.groupby(pairs):
                style = Style(color=Color.from_rgb(*upper), bgcolor=Color.from_rgb(*lower))
                yield Segment("▀" * sum(1 for _ in same), style)
            yield Segment.line()


def fits(columns: int, rows: int) -> bool:
    return columns >= _LEAST[0] and rows >= _LEAST[1]


def _draw(image: Image.Image, marks: list[Mark], labels: list[str]) -> None:
    pen = ImageDraw.Draw(image)
    right, bottom = image.width - 1, image.height - 1
    for mark in marks:
        colour = PALETTE[labels.index(mark.label) % len(PALETTE)]
        match mark:
            case Detection() | Outline():
                pen.rectangle(mark.box.to_pixels(right, bottom), outline=colour)
            case PointedObject():
                x, y = mark.point.to_pixels(right, bottom)
                pen.rectangle((x - 1, y - 1, x + 1, y + 1), fill=colour)
