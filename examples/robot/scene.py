"""Drawings that move, and where each of them is at any moment.

Everything is a function of the scene's seed and of the time t, in seconds from the start. Images
and truth come from the same placements, so the truth is exact, and known between frames too.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import random
from pathlib import Path

import numpy as np
from legato_client import Box
from PIL import Image

ART = Path(__file__).with_name("art")
NOUNS = tuple(sorted(path.stem for path in ART.glob("*.webp")))

_SKY = ((126, 190, 240), (232, 244, 252))  # colours at the top and at the bottom
_MEADOW = ((150, 205, 110), (94, 160, 76))
_HORIZON = 0.62  # share of the height
_JPEG_QUALITY = 90

Colour = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Path1D:
    """A swing: `middle` plus `reach` times a sine of `period` seconds."""

    middle: float
    reach: float
    period: float
    phase: float

    def at(self, t: float) -> float:
        return self.middle + self.reach * math.sin(2 * math.pi * t / self.period + self.phase)


@dataclasses.dataclass(frozen=True)
class Thing:
    """A drawing on its way; centre and longer side are in pixels of the image."""

    noun: str
    x: Path1D
    y: Path1D
    side: Path1D

    def place(self, t: float) -> tuple[int, int, int, int]:
        """Left, top, width, height at time t, in whole pixels."""
        art = drawing(self.noun)
        scale = self.side.at(t) / max(art.size)
        width, height = round(art.width * scale), round(art.height * scale)
        return round(self.x.at(t) - width / 2), round(self.y.at(t) - height / 2), width, height


@dataclasses.dataclass(frozen=True)
class Scene:
    """Things in front of a ground, `size` pixels wide and high."""

    size: tuple[int, int]
    things: tuple[Thing, ...]

    def truth(self, t: float) -> dict[str, Box]:
        """Return the box of every thing at time t, by its noun."""
        return {thing.noun: self._box(thing, t) for thing in self.things}

    def image(self, t: float) -> Image.Image:
        """Draw what a camera sees at time t."""
        canvas = _ground(self.size).copy()
        for thing in self.things:
            left, top, width, height = thing.place(t)
            art = drawing(thing.noun).resize((width, height), Image.Resampling.BILINEAR)
            canvas.paste(art, (left, top), art)
        return canvas

    def jpeg(self, t: float) -> bytes:
        """Return the image at time t as a file, as a camera gives it."""
        buffer = io.BytesIO()
        self.image(t).save(buffer, "JPEG", quality=_JPEG_QUALITY)
        return buffer.getvalue()

    def _box(self, thing: Thing, t: float) -> Box:
        left, top, width, height = thing.place(t)
        across, down = self.size
        return Box(left / across, top / down, (left + width) / across, (top + height) / down)


def compose(nouns: tuple[str, ...], seed: int, size: tuple[int, int] = (640, 480)) -> Scene:
    """Compose a scene with one thing of each noun, in lanes, so that none hides another.

    The things swing from side to side, come nearer and go away again, at most half an image's
    width a second. ValueError for a noun without a drawing, one given twice, or more than five.
    """
    if unknown := [noun for noun in nouns if noun not in NOUNS]:
        raise ValueError(f"no drawing of {', '.join(unknown)}: there are {', '.join(NOUNS)}")
    if not 1 <= len(set(nouns)) == len(nouns) <= 5:
        raise ValueError(f"need one to five different nouns, got {len(nouns)}: {', '.join(nouns)}")
    chance = random.Random(seed)
    things = (_thing(noun, lane, len(nouns), size, chance) for lane, noun in enumerate(nouns))
    return Scene(size, tuple(things))


def _thing(noun: str, lane: int, lanes: int, size: tuple[int, int], chance: random.Random) -> Thing:
    width, height = size
    band = height / lanes
    side = min(0.78 * band, 0.4 * width)  # with its growth and its swing it stays in its lane
    growth, drift = 0.1 * side, 0.05 * band
    room = width / 2 - (side + growth) / 2
    return Thing(
        noun,
        x=_swing(width / 2, room, (5.0, 8.0), chance),
        y=_swing(band * (lane + 0.5), drift, (2.0, 4.0), chance),
        side=_swing(side, growth, (3.0, 6.0), chance),
    )


def _swing(
    middle: float, reach: float, periods: tuple[float, float], chance: random.Random
) -> Path1D:
    return Path1D(middle, reach, chance.uniform(*periods), chance.uniform(0, 2 * math.pi))


@functools.cache
def drawing(noun: str) -> Image.Image:
    """Load the drawing of a noun, cropped to what is visible; not to be changed."""
    with Image.open(ART / f"{noun}.webp") as art:
        return art.convert("RGBA")


@functools.cache
def _ground(size: tuple[int, int]) -> Image.Image:
    """Draw a sky over a meadow; not to be changed."""
    width, height = size
    horizon = round(height * _HORIZON)
    rows = np.concatenate([_ramp(*_SKY, horizon), _ramp(*_MEADOW, height - horizon)])
    return Image.fromarray(np.repeat(rows[:, None], width, axis=1))


def _ramp(top: Colour, bottom: Colour, rows: int) -> np.ndarray:
    shares = np.linspace(0, 1, rows)[:, None]
    return np.rint(np.array(top) * (1 - shares) + np.array(bottom) * shares).astype(np.uint8)
