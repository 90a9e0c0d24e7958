"""Clips of things that move, cross, hide and are missed, as a model's boxes with known truth.

No pictures: what a detector sees is drawn at random, so thousands of frames take no time. Boxes are
arrays of centre x, centre y, width and height, in shares of the picture.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Path = Callable[[float], Array]

HIDDEN = 0.5  # share of a thing behind another one from which it is not found
NOISE = 0.015  # deviation of a found edge's place, in sizes of the thing
ASPECT = 4 / 3


@dataclasses.dataclass(frozen=True)
class Frame:
    """What is in a picture, by the thing's number, and what the detector found."""

    sequence: int
    time: float
    truth: dict[int, Array]
    found_DA: Array


@dataclasses.dataclass(frozen=True)
class Motion:
    """A kind of clip: `things` gives the paths of one clip, in the order from far to near."""

    name: str
    things: Callable[[np.random.Generator], list[Path]]


def clip(
    motion: Motion, seed: int, seconds: float, fps: float, missed: float, extra: float
) -> list[Frame]:
    """Make a clip in which a fraction `missed` of visible things is not found.

    `extra` boxes a frame are of nothing.
    """
    rng = np.random.default_rng(seed)
    paths = motion.things(rng)
    frames = []
    for k in range(round(seconds * fps)):
        boxes = [path(k / fps) for path in paths]
        visible = {
            i: box
            for i, box in enumerate(boxes)
            if _inside(box) and _hidden(box, boxes[i + 1 :]) < HIDDEN
        }
        frames.append(Frame(k + 1, k / fps, visible, _found(visible, rng, missed, extra)))
    return frames


def _found(
    visible: dict[int, Array], rng: np.random.Generator, missed: float, extra: float
) -> Array:
    found = [
        box + rng.normal(size=4) * NOISE * np.tile(box[2:], 2)
        for box in visible.values()
        if rng.random() >= missed
    ]
    found += [rng.uniform([0, 0, 0.03, 0.03], [1, 1, 0.2, 0.2]) for _ in range(rng.poisson(extra))]
    rng.shuffle(found)
    return np.clip(np.array(found).reshape(-1, 4), 0, 1)


def _inside(box: Array) -> bool:
    return bool(np.all((box[:2] > 0) & (box[:2] < 1)))


def _hidden(box: Array, nearer: list[Array]) -> float:
    """Return the greatest fraction of the box behind one nearer box."""
    return max((_shared(box, each) / (box[2] * box[3]) for each in nearer), default=0.0)


def _shared(one: Array, other: Array) -> float:
    reach = (one[2:] + other[2:]) / 2 - np.abs(one[:2] - other[:2])
    inner = np.minimum(np.minimum(one[2:], other[2:]), reach)
    return float(np.prod(np.maximum(inner, 0)))


# ---------------------------------------------------------------- motions


def _swing(
    rng: np.random.Generator, middle: float, reach: float, period: tuple[float, float]
) -> Callable[[float], float]:
    length, phase = rng.uniform(*period), rng.uniform(0, 2 * math.pi)
    return lambda t: middle + reach * math.sin(2 * math.pi * t / length + phase)


def _lanes(rng: np.random.Generator) -> list[Path]:
    """Move the things of the robot's example, each in a lane of its own."""
    count = 4
    return [
        _path(
            _swing(rng, 0.5, 0.4, (5, 8)),
            _swing(rng, (lane + 0.5) / count, 0.01, (2, 4)),
            _swing(rng, 0.14, 0.014, (3, 6)),
        )
        for lane in range(count)
    ]


def _crossings(rng: np.random.Generator) -> list[Path]:
    """Things that swing across each other's ways, and hide each other."""
    return [
        _path(
            _swing(rng, 0.5, 0.4, (5, 8)),
            _swing(rng, rng.uniform(0.35, 0.65), 0.1, (4, 8)),
            _swing(rng, 0.15, 0.015, (3, 6)),
        )
        for _ in range(4)
    ]


def _crowd(rng: np.random.Generator) -> list[Path]:
    """Things that walk straight through the picture, come and leave, many alike."""
    return [_walk(rng) for _ in range(14)]


def _walk(rng: np.random.Generator) -> Path:
    start, speed = rng.uniform(-0.5, 1.5, 2), rng.normal(size=2) * [0.12, 0.04]
    width = rng.uniform(0.05, 0.08)
    size = np.array([width, width * ASPECT * 1.5])
    bend = _swing(rng, 0, 0.02, (2, 4))

    def at(t: float) -> Array:
        place = (start + speed * t + [0, bend(t)] + 0.5) % 2 - 0.5
        return np.concatenate([place, size])

    return at


def _dash(rng: np.random.Generator) -> list[Path]:
    """Small things that start and stop suddenly, as hands and tools do."""
    return [_dashing(rng) for _ in range(3)]


def _dashing(rng: np.random.Generator) -> Path:
    knots, now = [], 0.0
    place = rng.uniform(0.1, 0.9, 2)
    while now < 60:
        rest, way = rng.uniform(0.2, 1.0), rng.uniform(0.3, 0.7)
        goal = rng.uniform(0.1, 0.9, 2)
        knots += [(now, place), (now + rest, place)]
        now, place = now + rest + way, goal
    times = np.array([time for time, _ in knots])
    places = np.array([each for _, each in knots])
    size = rng.uniform(0.1, 0.16) * np.array([1, ASPECT])
    return lambda t: np.array([*(np.interp(t, times, places[:, i]) for i in (0, 1)), *size])


def _path(
    x: Callable[[float], float], y: Callable[[float], float], side: Callable[[float], float]
) -> Path:
    return lambda t: np.array([x(t), y(t), side(t), side(t) * ASPECT])


MOTIONS = (
    Motion("lanes", _lanes),
    Motion("crossings", _crossings),
    Motion("crowd", _crowd),
    Motion("dashes", _dash),
)


# ---------------------------------------------------------------- answered frames

# Which frames of a clip are answered, and in which order, by how busy the server is.


@dataclasses.dataclass(frozen=True)
class Load:
    """A server that takes `seconds` for a frame; the newest frame waits, the others are dropped.

    With several `in_flight` a frame takes `seconds` to twice that, at random, and they overtake.
    """

    name: str
    seconds: float
    in_flight: int = 1

    def answered(self, frames: list[Frame], seed: int) -> list[Frame]:
        """Return the frames that get results, in their order."""
        rng = np.random.default_rng(seed)
        free = [0.0] * self.in_flight  # when each place is free again
        waiting, ends = list(frames), []
        while waiting:
            place = int(np.argmin(free))
            now = max(free[place], waiting[0].time)
            newest = [frame for frame in waiting if frame.time <= now][-1]
            waiting = [frame for frame in waiting if frame.time > newest.time]
            factor = 1 if self.in_flight == 1 else rng.uniform(1, 2)
            free[place] = now + self.seconds * factor
            ends.append((free[place], newest))
        return [frame for _, frame in sorted(ends, key=lambda each: each[0])]


LOADS = (
    Load("30 a second", 0.001),
    Load("30 a second, out of order", 0.06, in_flight=8),
    Load("3 times too many", 0.1),
    Load("3 times too many, out of order", 0.2, in_flight=3),
    Load("10 times too many", 0.333),
    Load("20 times too many", 0.667),
)
