"""SVG paths to masks, by the nonzero fill rule.

Shape legend: N points of a polygon, E edges, H, W rows and columns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from legato_engine.models.moondream.outlines.rings import Mask

Points = npt.NDArray[np.float64]
Position = complex
"""x and y as one number, so that a product rotates it."""

_CHORDS = 16  # of a curve
_PIECE = re.compile(r"[A-Za-z]|[-+]?(?:\d+\.?\d*|\.\d+)")
_NUM_ARGUMENTS = {"M": 2, "L": 2, "H": 1, "V": 1, "C": 6, "S": 4, "Q": 4, "T": 2, "A": 7, "Z": 0}
_AHEAD = np.linspace(0, 1, _CHORDS + 1)[1:]


def polygons(path: str) -> list[Points]:
    """The rings [N, 2] of a path, closed or not, with curves as chords.

    Every command has complete groups of numbers, as `SvgPath` writes them.
    """
    pen = _Pen()
    for command, numbers in _strokes(path):
        pen.draw(command, numbers)
    return [np.array([(at.real, at.imag) for at in ring]) for ring in pen.rings if len(ring) > 2]


def enclosed(rings: Sequence[Points], xs_W: Points, ys_H: Points) -> Mask:
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
            if not _NUM_ARGUMENTS[command.upper()]:
                yield command, []
            continue
        numbers.append(float(piece))
        if len(numbers) == _NUM_ARGUMENTS[command.upper()]:
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
        """A lower-case command is relative to the pen."""
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
