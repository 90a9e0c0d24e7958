"""SVG paths to masks: what a path encloses, by the rule that a renderer has unless it is told.

Shape legend: N points of a polygon, E edges of all, H, W rows and columns of places.
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
Place = complex
"""x and y as one number, so that a place can be turned by a product."""

_CHORDS = 16  # of a curve
_PIECE = re.compile(r"[A-Za-z]|[-+]?(?:\d+\.?\d*|\.\d+)")
_NUM_ARGUMENTS = {"M": 2, "L": 2, "H": 1, "V": 1, "C": 6, "S": 4, "Q": 4, "T": 2, "A": 7, "Z": 0}
_AHEAD = np.linspace(0, 1, _CHORDS + 1)[1:]


def polygons(path: str) -> list[Points]:
    """The rings of a path [N, 2], closed or not, curves as chords.

    `path` is as `tasks.svg_path` writes it: whole groups of numbers behind every command.
    """
    pen = _Pen()
    for command, numbers in _strokes(path):
        pen.draw(command, numbers)
    return [np.array([(at.real, at.imag) for at in ring]) for ring in pen.rings if len(ring) > 2]


def enclosed(rings: Sequence[Points], xs_W: Points, ys_H: Points) -> Mask:
    """Whether the places [H, W] of these columns and rows lie within rings, closed each.

    They do unless the rings wind around them as often one way as the other. Both `xs_W` and `ys_H`
    rise or stay.
    """
    change = np.zeros((len(ys_H), len(xs_W) + 1), np.int16)
    if rings:
        ends_E2 = np.concatenate([np.roll(ring, -1, axis=0) for ring in rings])
        _count(change, np.concatenate(rings), ends_E2, xs_W, ys_H)
    within: Mask = np.cumsum(change, axis=1, dtype=np.int16)[:, :-1] != 0
    return within


def _count(
    change: npt.NDArray[np.int16], starts_E2: Points, ends_E2: Points, xs_W: Points, ys_H: Points
) -> None:
    """Where the winding changes along each row, for all places from there on."""
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
    """Commands with their own numbers; more groups of these repeat the command."""
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
    """Draws strokes; where it stands is the last place of its newest ring."""

    def __init__(self) -> None:
        self.rings: list[list[Place]] = []
        self._at: Place = 0
        self._handle: Place = 0  # of the last curve, as the next smooth one mirrors it
        self._last = ""

    def draw(self, command: str, numbers: Sequence[float]) -> None:
        """One stroke; lower case is relative to where the pen stands."""
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

    def _stroke(self, kind: str, base: Place, numbers: Sequence[float]) -> None:
        if kind == "H":
            self._go([complex(numbers[0] + base.real, self._at.imag)])
        elif kind == "V":
            self._go([complex(self._at.real, numbers[0] + base.imag)])
        elif kind == "A":
            self._go(_arc(self._at, base + complex(*numbers[5:]), *numbers[:5]))
        else:
            places = [base + complex(*numbers[at : at + 2]) for at in range(0, len(numbers), 2)]
            self._curve(kind, places)

    def _curve(self, kind: str, places: list[Place]) -> None:
        if kind in "ST":
            smooth = self._last in ("CS" if kind == "S" else "QT")
            places = [2 * self._at - self._handle if smooth else self._at, *places]
        if kind in "CSQT":
            self._handle = places[-2]
        self._go(_bezier([self._at, *places]) if len(places) > 1 else places)

    def _go(self, places: Sequence[Place]) -> None:
        self.rings[-1] += places
        self._at = places[-1]


def _bezier(control: Sequence[Place]) -> list[Place]:
    """Places on a curve of any degree, without its start."""
    level = [np.full(_CHORDS, place, np.complex128) for place in control]
    while len(level) > 1:
        level = [first + (second - first) * _AHEAD for first, second in pairwise(level)]
    return [*level[0][:-1].tolist(), control[-1]]


def _arc(
    start: Place, end: Place, rx: float, ry: float, degrees: float, large: float, sweep: float
) -> list[Place]:
    """Places on an elliptic arc, without its start; a line where the ellipse is none."""
    rx, ry = abs(rx), abs(ry)
    if start == end or not (rx and ry):
        return [end]
    turn = complex(math.cos(math.radians(degrees)), math.sin(math.radians(degrees)))

    def on_circle(place: Place) -> Place:
        turned = place * turn.conjugate()
        return complex(turned.real / rx, turned.imag / ry)

    # On the unit circle that the ellipse becomes, the centre lies beside the middle of the chord.
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
    places = start + (away.real * rx + 1j * away.imag * ry) * turn
    return [*places[:-1].tolist(), end]
