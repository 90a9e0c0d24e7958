"""How well boxes fit, and what fitting costs when the boxes come late."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from legato_client import Box

HIT = 0.5  # the least overlap that counts as found


def overlap(one: Box, other: Box) -> float:
    """Intersection over union, 0..1; 0 where neither has an area."""
    width = min(one.x_max, other.x_max) - max(one.x_min, other.x_min)
    height = min(one.y_max, other.y_max) - max(one.y_min, other.y_min)
    shared = max(width, 0.0) * max(height, 0.0)
    union = _area(one) + _area(other) - shared
    return shared / union if union > 0 else 0.0


def match(found: Sequence[Box], truth: Sequence[Box]) -> list[float]:
    """Return the overlap of each true box with its match, in the order of `truth`.

    Pairs are taken by greatest overlap first; a box is matched at most once, and a true box that
    gets none has 0.
    """
    pairs = sorted(
        ((overlap(box, true), i, j) for i, box in enumerate(found) for j, true in enumerate(truth)),
        reverse=True,
    )
    taken: set[int] = set()
    scores: dict[int, float] = {}
    for score, i, j in pairs:
        if score > 0 and i not in taken and j not in scores:
            taken.add(i)
            scores[j] = score
    return [scores.get(j, 0.0) for j in range(len(truth))]


def mean(values: Sequence[float]) -> float:
    """Their mean; not a number if there are none."""
    return math.fsum(values) / len(values) if values else math.nan


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that `share` (0..1) of the values do not exceed; NaN if none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def quantiles(values: Sequence[float]) -> Mapping[str, float]:
    """Return the three quantiles that are reported."""
    return {f"p{p}": percentile(values, p / 100) for p in (50, 90, 99)}


def _area(box: Box) -> float:
    return max(box.x_max - box.x_min, 0.0) * max(box.y_max - box.y_min, 0.0)
