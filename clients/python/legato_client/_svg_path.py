"""SVG path text to polygons.

A model writes straight strokes; a refiner adds cubic curves, which become a few chords each. Other
curves become one chord to their end point.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

Ring = tuple[tuple[float, float], ...]

_PIECE = re.compile(r"[A-Za-z]|[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_SEPARATORS = re.compile(r"[\s,]*")
_CHORDS = 8  # per cubic curve
_NUM_ARGUMENTS = {"M": 2, "L": 2, "T": 2, "H": 1, "V": 1, "S": 4, "Q": 4, "C": 6, "A": 7, "Z": 0}


def polygons(path: str) -> tuple[Ring, ...]:
    """Return the path's rings, each a tuple of (x, y) without a repeated last point.

    Rings of fewer than three points are left out. Raises ValueError for text that is not a path.
    """
    rings: list[list[tuple[float, float]]] = []
    x = y = 0.0
    closed = False
    for command, numbers in _strokes(path):
        upper = command.upper()
        if upper == "Z":
            if rings:
                x, y = rings[-1][0]
            closed = True
            continue
        if upper != "M" and not rings:
            raise ValueError(f"path draws before it moves: {path!r}")
        if upper == "M" or closed:
            rings.append([] if upper == "M" else [(x, y)])
            closed = False
        base_x, base_y = (0.0, 0.0) if command == upper else (x, y)
        if upper == "C":
            handles = [
                (base_x + dx, base_y + dy)
                for dx, dy in zip(numbers[::2], numbers[1::2], strict=True)
            ]
            rings[-1] += _on_curve((x, y), *handles)
        if upper != "V":
            x = base_x + (numbers[0] if upper == "H" else numbers[-2])
        if upper != "H":
            y = base_y + numbers[-1]
        rings[-1].append((x, y))
    return tuple(ring for ring in map(_open, rings) if len(ring) >= 3)


def _on_curve(
    start: tuple[float, float],
    first: tuple[float, float],
    second: tuple[float, float],
    end: tuple[float, float],
) -> list[tuple[float, float]]:
    """Return points on the curve, without its ends."""
    points = []
    for step in range(1, _CHORDS):
        u = step / _CHORDS
        v = 1 - u
        weights = (v * v * v, 3 * u * v * v, 3 * u * u * v, u * u * u)
        places = zip((start, first, second, end), weights, strict=True)
        weighted = [(x * weight, y * weight) for (x, y), weight in places]
        points.append((sum(x for x, _ in weighted), sum(y for _, y in weighted)))
    return points


def _open(ring: list[tuple[float, float]]) -> Ring:
    return tuple(ring[:-1] if len(ring) > 1 and ring[0] == ring[-1] else ring)


def _strokes(path: str) -> Iterator[tuple[str, list[float]]]:
    """Yield the path's strokes; repeated number groups repeat the command."""
    if not _SEPARATORS.fullmatch(_PIECE.sub("", path)):
        raise ValueError(f"not a path: {path!r}")
    commands: list[tuple[str, list[float]]] = []
    for piece in _PIECE.findall(path):
        if piece.isalpha():
            commands.append((piece, []))
        elif commands:
            commands[-1][1].append(float(piece))
        else:
            raise ValueError(f"path has a number without a command: {path!r}")
    for command, numbers in commands:
        count = _NUM_ARGUMENTS.get(command.upper())
        if count is None:
            raise ValueError(f"path has an unknown command {command}: {path!r}")
        if numbers and (count == 0 or len(numbers) % count):
            raise ValueError(f"path command {command} takes {count} numbers at a time: {path!r}")
        if count == 0:
            yield command, []
        repeated = {"M": "L", "m": "l"}.get(command, command)
        for start in range(0, len(numbers), count or 1):
            yield repeated if start else command, numbers[start : start + count]
