"""Lines and curves fitted to rings of pixel borders, by Schneider's method."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from legato_engine.models.moondream.outlines.rings import Ring

Points = npt.NDArray[np.float64]

_CORNER = np.cos(np.radians(50))  # a sharper turn is a corner
_REACH = 6  # steps along the ring that define a turn or a tangent
_REFITS = 4
_WORTH_REFITTING = 4.0  # times the tolerance


class Stroke(NamedTuple):
    """A line to one point, or a curve of three points, from the last stroke's end."""

    points: Points

    @property
    def is_line(self) -> bool:
        return len(self.points) == 1


class Curve(NamedTuple):
    """A closed curve."""

    start: Points
    strokes: tuple[Stroke, ...]


def fit(ring: Ring, tolerance: float) -> Curve:
    """Fit a curve within `tolerance` pixels of a ring, without its staircase.

    Midpoints of a ring's steps are within half a pixel of the shape that the mask was drawn from;
    means of three midpoints are nearer.
    """
    middles = (ring + np.roll(ring, -1, axis=0)) / 2
    points = (middles + np.roll(middles, 1, axis=0) + np.roll(middles, -1, axis=0)) / 3
    corners = _corners(points)
    first = int(corners[0]) if len(corners) else 0
    points = np.roll(points, -first, axis=0)
    cuts = [*(corners - first).tolist(), len(points)]
    if not len(corners):
        cuts = [0, len(points) // 2, len(points)]
    closed = np.concatenate([points, points[:1]])
    tangents = _tangents(closed, cuts, smooth=not len(corners))
    strokes: list[Stroke] = []
    for (begin, end), (out, back) in zip(pairwise(cuts), tangents, strict=True):
        strokes += _strokes(closed[begin : end + 1], out, back, tolerance)
    return Curve(points[0], tuple(strokes))


def _corners(points: Points) -> npt.NDArray[np.int64]:
    reach = _reach(len(points))
    before = _unit(points - np.roll(points, reach, axis=0))
    after = _unit(np.roll(points, -reach, axis=0) - points)
    straight = (before * after).sum(axis=1)
    # Of equal turns the middle one: the neighbours break the tie.
    turn = -(straight + 1e-3 * (np.roll(straight, 1) + np.roll(straight, -1)))
    sharpest = np.max([np.roll(turn, n) for n in range(-reach, reach + 1)], axis=0)
    found = np.flatnonzero((straight < _CORNER) & (turn >= sharpest))
    return found[np.diff(found, prepend=-len(points)) > reach]


def _reach(count: int) -> int:
    return max(1, min(_REACH, count // 8))


def _tangents(closed: Points, cuts: Sequence[int], *, smooth: bool) -> list[tuple[Points, Points]]:
    """Directions of each piece from its start and back from its end."""
    pairs = []
    for begin, end in pairwise(cuts):
        reach = min(_reach(len(closed)), end - begin)
        pairs.append(
            (
                _unit(closed[begin + reach] - closed[begin]),
                _unit(closed[end - reach] - closed[end]),
            )
        )
    if smooth:  # the same tangent on both sides of a cut
        (out, middle_back), (middle_out, back) = pairs
        through, across = _unit(out - back), _unit(middle_out - middle_back)
        pairs = [(through, -across), (across, -through)]
    return pairs


def _strokes(points: Points, out: Points, back: Points, tolerance: float) -> list[Stroke]:
    chord = points[-1] - points[0]
    offset = points - points[0]
    length = np.hypot(*chord)
    if length and np.abs(chord[0] * offset[:, 1] - chord[1] * offset[:, 0]).max() <= (
        tolerance * length
    ):
        return [Stroke(points[-1:])]
    if len(points) <= 3:
        return [Stroke(point[None]) for point in points[1:]]
    control, worst, error = _fitted(points, out, back, tolerance)
    if error <= tolerance:
        return [Stroke(control[1:])]
    reach = min(_reach(len(points)), worst, len(points) - 1 - worst)
    through = _unit(points[worst + reach] - points[worst - reach])
    return [
        *_strokes(points[: worst + 1], out, -through, tolerance),
        *_strokes(points[worst:], through, back, tolerance),
    ]


def _fitted(
    points: Points, out: Points, back: Points, tolerance: float
) -> tuple[Points, int, float]:
    """The best curve, and the farthest inner point's index and distance."""
    steps = np.hypot(*np.diff(points, axis=0).T)
    u_N = np.concatenate([[0.0], np.cumsum(steps)]) / steps.sum()
    for _ in range(_REFITS):
        control = _least_squares(points, u_N, out, back)
        away = _bernstein(u_N) @ control - points
        distance_N = np.hypot(*away.T)
        worst = int(distance_N[1:-1].argmax()) + 1
        error = float(distance_N[worst])
        if error <= tolerance or error > _WORTH_REFITTING * tolerance:
            break
        u_N = _nearer(control, u_N, away)
    return control, worst, error


def _least_squares(points: Points, u_N: Points, out: Points, back: Points) -> Points:
    weights_N4 = _bernstein(u_N)
    first, last = points[0], points[-1]
    ends = np.outer(weights_N4[:, :2].sum(1), first) + np.outer(weights_N4[:, 2:].sum(1), last)
    rest = points - ends
    basis = np.stack([weights_N4[:, 1, None] * out, weights_N4[:, 2, None] * back])
    gram = np.einsum("ind,jnd->ij", basis, basis)
    wanted = np.einsum("ind,nd->i", basis, rest)
    span = float(np.hypot(*(last - first)))
    handles = np.full(2, span / 3)
    if abs(np.linalg.det(gram)) > 1e-9:
        solved = np.linalg.solve(gram, wanted)
        if solved.min() > 1e-3 * span:
            handles = solved
    return np.stack([first, first + handles[0] * out, last + handles[1] * back, last])


def _nearer(control: Points, u_N: Points, away: Points) -> Points:
    """Move parameters by a Newton step towards the nearest points."""
    edges = 3 * np.diff(control, axis=0)
    bends = 2 * np.diff(edges, axis=0)
    u, v = u_N[:, None], 1 - u_N[:, None]
    speed = v * v * edges[0] + 2 * u * v * edges[1] + u * u * edges[2]
    bend = v * bends[0] + u * bends[1]
    slope = (speed * speed).sum(1) + (away * bend).sum(1)
    step = np.where(np.abs(slope) > 1e-9, (away * speed).sum(1) / np.where(slope, slope, 1), 0.0)
    return np.clip(u_N - step, 0.0, 1.0)


def _bernstein(u_N: Points) -> Points:
    u, v = u_N, 1 - u_N
    return np.stack([v * v * v, 3 * u * v * v, 3 * u * u * v, u * u * u], axis=1)


def _unit(vectors: Points) -> Points:
    length = np.sqrt((vectors * vectors).sum(-1, keepdims=True))
    units: Points = vectors / np.where(length, length, 1.0)
    return units
