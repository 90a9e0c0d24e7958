"""Fits of confidences to how often they are right: temperature scaling, with an offset if it helps.

The engine reads what is fitted here: a score s becomes the logistic of logit(s) / temperature +
offset.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

NUM_BINS = 10
_LEAST = 1e-9  # a score's distance from 0 and 1 in its logit
_STEPS = 100
_FLATTEST = 1e-3  # 1 / temperature; scores keep their order

Pairs = Sequence[tuple[float, bool]]
"""Scores, and whether their objects were right."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The identity by default."""

    temperature: float = 1.0
    offset: float = 0.0

    def __call__(self, score: float) -> float:
        return _logistic(_logit(score) / self.temperature + self.offset)


@dataclass(frozen=True, slots=True)
class Bin:
    """Objects of nearly the same confidence."""

    count: int
    confidence: float  # their mean
    right: float  # the share that was right


def fit(pairs: Pairs) -> Fit:
    """The least log loss; with an offset only if that gains more than it costs (BIC).

    As in Platt's method, the targets are a little inside 0 and 1, so that the fit is finite where
    all are right.
    """
    if not pairs:
        return Fit()
    plain, moved = _newton(pairs, offset=False), _newton(pairs, offset=True)
    gain = _loss(plain, pairs) - _loss(moved, pairs)
    return moved if gain > math.log(len(pairs)) / 2 else plain


def log_loss(fitted: Fit, pairs: Pairs) -> float:
    """The mean, in nats."""
    chances = ((fitted(score), right) for score, right in pairs)
    inside = ((min(max(chance, _LEAST), 1 - _LEAST), right) for chance, right in chances)
    return -math.fsum(math.log(c if right else 1 - c) for c, right in inside) / max(len(pairs), 1)


def reliability(fitted: Fit, pairs: Pairs, num_bins: int = NUM_BINS) -> list[Bin]:
    """Bins of equal width, without the empty ones."""
    members: list[list[tuple[float, bool]]] = [[] for _ in range(num_bins)]
    for score, right in pairs:
        confidence = fitted(score)
        members[min(int(confidence * num_bins), num_bins - 1)].append((confidence, right))
    return [
        Bin(len(each), _mean([c for c, _ in each]), _mean([float(right) for _, right in each]))
        for each in members
        if each
    ]


def calibration_error(fitted: Fit, pairs: Pairs, num_bins: int = NUM_BINS) -> float:
    """ECE: the mean distance of confidence and share right over the bins, by their counts."""
    bins = reliability(fitted, pairs, num_bins)
    apart = math.fsum(each.count * abs(each.confidence - each.right) for each in bins)
    return apart / max(len(pairs), 1)


def _newton(pairs: Pairs, *, offset: bool) -> Fit:
    """Of slope and offset; without the latter it stays 0."""
    targets, slope, shift = _targets(pairs), 1.0, 0.0
    for _ in range(_STEPS):
        g_slope = g_shift = h_slope = h_both = h_shift = 0.0
        for logit, target in targets:
            chance = _logistic(slope * logit + shift)
            apart, weight = chance - target, max(chance * (1 - chance), 1e-12)
            g_slope += apart * logit
            g_shift += apart
            h_slope += weight * logit * logit
            h_both += weight * logit
            h_shift += weight
        if offset:
            determinant = h_slope * h_shift - h_both * h_both + 1e-12
            d_slope = (g_slope * h_shift - g_shift * h_both) / determinant
            d_shift = (g_shift * h_slope - g_slope * h_both) / determinant
        else:
            d_slope, d_shift = g_slope / (h_slope + 1e-12), 0.0
        largest = max(abs(d_slope), abs(d_shift))
        step = min(1.0, 0.5 / largest) if largest else 0.0
        slope = max(slope - step * d_slope, _FLATTEST)
        shift -= step * d_shift
        if largest < 1e-9:
            break
    return Fit(1.0 / slope, shift)


def _loss(fitted: Fit, pairs: Pairs) -> float:
    """Against the targets of the fit, summed."""
    total = 0.0
    for logit, target in _targets(pairs):
        chance = _logistic(logit / fitted.temperature + fitted.offset)
        chance = min(max(chance, _LEAST), 1 - _LEAST)
        total -= target * math.log(chance) + (1 - target) * math.log(1 - chance)
    return total


def _targets(pairs: Pairs) -> list[tuple[float, float]]:
    num_right = sum(right for _, right in pairs)
    high = (num_right + 1) / (num_right + 2)
    low = 1 / (len(pairs) - num_right + 2)
    return [(_logit(score), high if right else low) for score, right in pairs]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _logit(share: float) -> float:
    share = min(max(share, _LEAST), 1 - _LEAST)
    return math.log(share / (1 - share))


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
