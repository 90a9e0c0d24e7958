"""Conversion between SVG paths, masks and fitted curves.

Shape legend: N points of a polygon, E edges, H, W rows and columns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter

from legato_engine.models.moondream.tasks import ARITY

Points = npt.NDArray[np.float64]
Position = complex
"""x and y as one number, so that a product rotates it."""

_CHORDS = 16  # of a curve
_PIECE = re.compile(r"[A-Za-z]|[-+]?(?:\d+\.?\d*|\.\d+)")
_AHEAD = np.linspace(0, 1, _CHORDS + 1)[1:]


def polygons(path: str) -> list[Points]:
    """Convert a path to its rings [N, 2], closed or not, with curves as chords.

    Every command has complete groups of numbers, as `SvgPath` writes them.
    """
    pen = _Pen()
    for command, numbers in _strokes(path):
        pen.draw(command, numbers)
    return [np.array([(at.real, at.imag) for at in ring]) for ring in pen.rings if len(ring) > 2]


def enclosed(rings: Sequence[Points | Ring], xs_W: Points, ys_H: Points) -> Mask:
    """[H, W]: whether points at these ascending columns and rows lie within the rings."""
    change = np.zeros((len(ys_H), len(xs_W) + 1), np.int16)
    if rings:
        ends_E2 = np.concatenate([np.roll(ring, -1, axis=0) for ring in rings])
        _count(change, np.concatenate(rings), ends_E2, xs_W, ys_H)
    within: Mask = np.cumsum(change, axis=1, dtype=np.int16)[:, :-1] != 0
    return within


def _count(
    change: npt.NDArray[np.int16], starts_E2: Points, ends_E2: Points, xs_W: Points, ys_H: Points
) -> None:
    down = starts_E2[:, 1] < ends_E2[:, 1]
    upper = np.where(down[:, None], starts_E2, ends_E2)
    lower = np.where(down[:, None], ends_E2, starts_E2)
    first, stop = (np.searchsorted(ys_H, at[:, 1]) for at in (upper, lower))
    edge = np.repeat(np.arange(len(first)), stop - first)
    before = np.cumsum(stop - first) - (stop - first)
    row = np.arange(len(edge)) - before[edge] + first[edge]
    slope = (lower[edge, 0] - upper[edge, 0]) / (lower[edge, 1] - upper[edge, 1])
    x = upper[edge, 0] + (ys_H[row] - upper[edge, 1]) * slope
    np.add.at(change, (row, np.searchsorted(xs_W, x)), np.where(down[edge], -1, 1).astype(np.int16))


def _strokes(path: str) -> Iterator[tuple[str, list[float]]]:
    command, numbers = "", list[float]()
    for piece in _PIECE.findall(path):
        if piece.isalpha():
            command = piece
            if not ARITY[command.upper()]:
                yield command, []
            continue
        numbers.append(float(piece))
        if len(numbers) == ARITY[command.upper()]:
            yield command, numbers
            numbers = []
            command = {"M": "L", "m": "l"}.get(command, command)


class _Pen:
    """Draws strokes from the last position of the newest ring."""

    def __init__(self) -> None:
        self.rings: list[list[Position]] = []
        self._at: Position = 0
        self._handle: Position = 0  # of the last curve, mirrored by a smooth one
        self._last = ""

    def draw(self, command: str, numbers: Sequence[float]) -> None:
        """Draw a command; a lower-case one is relative to the pen."""
        kind = command.upper()
        base = self._at if command != kind else 0
        if kind == "Z":
            self._at = self.rings[-1][0]
        elif kind == "M":
            self._at = base + complex(*numbers)
        else:
            self._stroke(kind, base, numbers)
        if kind in "MZ":
            self.rings.append([self._at])
        self._last = kind

    def _stroke(self, kind: str, base: Position, numbers: Sequence[float]) -> None:
        if kind == "H":
            self._go([complex(numbers[0] + base.real, self._at.imag)])
        elif kind == "V":
            self._go([complex(self._at.real, numbers[0] + base.imag)])
        elif kind == "A":
            self._go(_arc(self._at, base + complex(*numbers[5:]), *numbers[:5]))
        else:
            positions = [base + complex(*numbers[at : at + 2]) for at in range(0, len(numbers), 2)]
            self._curve(kind, positions)

    def _curve(self, kind: str, positions: list[Position]) -> None:
        if kind in "ST":
            smooth = self._last in ("CS" if kind == "S" else "QT")
            positions = [2 * self._at - self._handle if smooth else self._at, *positions]
        if kind in "CSQT":
            self._handle = positions[-2]
        self._go(_bezier([self._at, *positions]) if len(positions) > 1 else positions)

    def _go(self, positions: Sequence[Position]) -> None:
        self.rings[-1] += positions
        self._at = positions[-1]


def _bezier(control: Sequence[Position]) -> list[Position]:
    """Positions on a curve of any degree, without its start."""
    level = [np.full(_CHORDS, position, np.complex128) for position in control]
    while len(level) > 1:
        level = [first + (second - first) * _AHEAD for first, second in pairwise(level)]
    return [*level[0][:-1].tolist(), control[-1]]


def _arc(
    start: Position, end: Position, rx: float, ry: float, degrees: float, large: float, sweep: float
) -> list[Position]:
    """Positions on an elliptic arc, without its start; a line if a radius is 0."""
    rx, ry = abs(rx), abs(ry)
    if start == end or not (rx and ry):
        return [end]
    turn = complex(math.cos(math.radians(degrees)), math.sin(math.radians(degrees)))

    def on_circle(position: Position) -> Position:
        turned = position * turn.conjugate()
        return complex(turned.real / rx, turned.imag / ry)

    # With the ellipse mapped to the unit circle, the centre is beside the middle of the chord.
    half = on_circle((end - start) / 2)
    grown = max(1.0, abs(half))  # an ellipse too small for both ends is scaled up
    half /= grown
    aside = math.sqrt(max(0.0, 1 - abs(half) ** 2)) * (1 if bool(large) != bool(sweep) else -1)
    centre = half + 1j * half / abs(half) * aside  # from the start
    first, last = -centre, 2 * half - centre
    angle = math.atan2((last / first).imag, (last / first).real)
    if sweep and angle < 0:
        angle += 2 * math.pi
    elif not sweep and angle > 0:
        angle -= 2 * math.pi
    away = (first * np.exp(1j * angle * _AHEAD) + centre) * grown
    positions = start + (away.real * rx + 1j * away.imag * ry) * turn
    return [*positions[:-1].tolist(), end]


# ---------------------------------------------------------------- rings

# A ring is a closed walk of unit steps along pixel borders, with the mask on its right (y points
# down): clockwise around an island, counter-clockwise around a hole. Pixels that touch at a corner
# are connected.
#
# Shape legend: H, W rows and columns of a mask, E corners of a ring.

Mask = npt.NDArray[np.bool_]
Ring = npt.NDArray[np.int64]
"""Corners (x, y) [E, 2], one unit apart, the last and the first too."""

_STEPS = np.array([(1, 0), (0, 1), (-1, 0), (0, -1)])  # right, down, left, up: turning right


def trace(mask_HW: Mask) -> list[Ring]:
    """List rings in the order of their topmost corners."""
    padded = np.pad(mask_HW, 1)
    above, below = padded[:-1, 1:-1], padded[1:, 1:-1]
    left, right = padded[1:-1, :-1], padded[1:-1, 1:]
    starts_of = (  # of the steps in each direction; each has a pixel of the mask on its right
        np.argwhere(below & ~above)[:, ::-1],
        np.argwhere(left & ~right)[:, ::-1],
        np.argwhere(above & ~below)[:, ::-1] + (1, 0),
        np.argwhere(right & ~left)[:, ::-1] + (0, 1),
    )
    starts = np.concatenate(starts_of)
    turns = np.repeat(np.arange(4), [len(each) for each in starts_of])
    if not len(starts):
        return []
    side = max(mask_HW.shape) + 1
    following = _following(starts, turns, side)
    return [starts[walk] for walk in _cycles(following.tolist(), np.lexsort(starts.T).tolist())]


def area(ring: Ring) -> float:
    """Pixels inside; negative for a hole."""
    x, y = ring.T
    return float(x @ np.roll(y, -1) - np.roll(x, -1) @ y) / 2


def cleaned(mask_HW: Mask, min_area: float) -> Mask:
    """Drop islands and holes below `min_area` pixels, then close by 3 by 3.

    The largest island always stays.
    """
    rings = [(area(ring), ring) for ring in trace(mask_HW)]
    largest = max((size for size, _ in rings), default=0.0)
    kept = [ring for size, ring in rings if abs(size) >= min_area or size == largest]
    ys_H, xs_W = (np.arange(count, dtype=np.float64) + 0.5 for count in mask_HW.shape)
    filled = Image.fromarray(np.pad(enclosed(kept, xs_W, ys_H), 1).view(np.uint8))
    closed = filled.filter(ImageFilter.MaxFilter(3)).filter(ImageFilter.MinFilter(3))
    return np.asarray(closed, np.bool_)[1:-1, 1:-1]


def _following(
    starts: npt.NDArray[np.int64], turns: npt.NDArray[np.int64], side: int
) -> npt.NDArray[np.int64]:
    keys = _keys(starts, turns, side)
    order = np.argsort(keys)
    ends = starts + _STEPS[turns]
    found = np.zeros(len(keys), np.int64)
    for turn in (1, 0, -1):  # of two steps the left one wins, which connects diagonal pixels
        wanted = _keys(ends, (turns + turn) % 4, side)
        index = np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)
        there = keys[order[index]] == wanted
        found[there] = order[index[there]]
    return found


def _keys(
    points: npt.NDArray[np.int64], turns: npt.NDArray[np.int64], side: int
) -> npt.NDArray[np.int64]:
    keys: npt.NDArray[np.int64] = (points[:, 1] * side + points[:, 0]) * 4 + turns
    return keys


def _cycles(following: list[int], order: list[int]) -> list[list[int]]:
    seen = bytearray(len(following))
    walks = []
    for first in order:
        walk, step = [], first
        while not seen[step]:
            seen[step] = 1
            walk.append(step)
            step = following[step]
        if walk:
            walks.append(walk)
    return walks


# ---------------------------------------------------------------- curves

# Lines and curves fitted to rings of pixel borders, by Schneider's method.

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
        strokes += _curve_strokes(closed[begin : end + 1], out, back, tolerance)
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


def _curve_strokes(points: Points, out: Points, back: Points, tolerance: float) -> list[Stroke]:
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
        *_curve_strokes(points[: worst + 1], out, -through, tolerance),
        *_curve_strokes(points[worst:], through, back, tolerance),
    ]


def _fitted(
    points: Points, out: Points, back: Points, tolerance: float
) -> tuple[Points, int, float]:
    """Fit a curve; return it with the farthest inner point's index and distance."""
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
