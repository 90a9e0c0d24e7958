"""Masks as rings of pixel borders, and back.

A ring is a closed walk of unit steps along pixel borders, with the mask on its right (y points
down): clockwise around an island, counter-clockwise around a hole. Pixels that touch at a corner
are connected.

Shape legend: H, W rows and columns of a mask, E corners of a ring.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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


def fill(rings: Sequence[Ring], shape: tuple[int, int]) -> Mask:
    """[H, W]: the mask that rings enclose, without holes."""
    height, width = shape
    change = np.zeros((height, width + 1), np.int16)
    for ring in rings:
        x, y = ring.T
        next_y = np.roll(y, -1)
        up, down = next_y < y, next_y > y
        np.add.at(change, (next_y[up], x[up]), 1)
        np.add.at(change, (y[down], x[down]), -1)
    filled: Mask = np.cumsum(change, axis=1, dtype=np.int16)[:, :width] > 0
    return filled


def cleaned(mask_HW: Mask, min_area: float) -> Mask:
    """Drop islands and holes below `min_area` pixels, then close by 3 by 3.

    The largest island always stays.
    """
    rings = [(area(ring), ring) for ring in trace(mask_HW)]
    largest = max((size for size, _ in rings), default=0.0)
    kept = [ring for size, ring in rings if abs(size) >= min_area or size == largest]
    return _closed(fill(kept, mask_HW.shape))


def _closed(mask_HW: Mask) -> Mask:
    padded = np.pad(mask_HW, 2)
    grown = _any_of_three(_any_of_three(padded, 0), 1)
    closed: Mask = ~_any_of_three(_any_of_three(~grown, 0), 1)
    return closed


def _any_of_three(mask_HW: Mask, axis: int) -> Mask:
    """Set if a pixel or a neighbour along the axis is; two shorter."""
    count = mask_HW.shape[axis] - 2
    first, second, third = (np.take(mask_HW, range(n, n + count), axis) for n in range(3))
    found: Mask = first | second | third
    return found


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
