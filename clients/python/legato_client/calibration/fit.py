"""Fits of confidences, and whether they improve held-out images.

The engine reads the fitted parameters: a score s becomes the logistic of logit(s) / temperature +
offset.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from legato_client.calibration.scored import Scored

NUM_BINS = 10
_LEAST = 1e-9  # a score's distance from 0 and 1 in its logit
_STEPS = 100
_FLATTEST = 1e-3  # 1 / temperature; scores keep their order

Pairs = Sequence[tuple[float, bool]]
"""Scores, and whether their objects were right."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Parameters of a fit; the defaults are the identity."""

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
    """Fit by the least log loss; add an offset only if its gain exceeds its cost (BIC).

    As in Platt's method, the targets are a little inside 0 and 1, so that the fit is finite where
    all are right.
    """
    if not pairs:
        return Fit()
    plain, moved = _newton(pairs, offset=False), _newton(pairs, offset=True)
    gain = _loss(plain, pairs) - _loss(moved, pairs)
    return moved if gain > math.log(len(pairs)) / 2 else plain


def log_loss(fitted: Fit, pairs: Pairs) -> float:
    """Return the mean log loss in nats."""
    chances = ((fitted(score), right) for score, right in pairs)
    inside = ((min(max(chance, _LEAST), 1 - _LEAST), right) for chance, right in chances)
    return -math.fsum(math.log(c if right else 1 - c) for c, right in inside) / max(len(pairs), 1)


def reliability(fitted: Fit, pairs: Pairs) -> list[Bin]:
    """Return bins of equal width, without the empty ones."""
    members: list[list[tuple[float, bool]]] = [[] for _ in range(NUM_BINS)]
    for score, right in pairs:
        confidence = fitted(score)
        members[min(int(confidence * NUM_BINS), NUM_BINS - 1)].append((confidence, right))
    return [
        Bin(len(each), _mean([c for c, _ in each]), _mean([float(right) for _, right in each]))
        for each in members
        if each
    ]


def calibration_error(fitted: Fit, pairs: Pairs) -> float:
    """Return the ECE: the mean distance of confidence and accuracy over the bins, by counts."""
    bins = reliability(fitted, pairs)
    apart = math.fsum(each.count * abs(each.confidence - each.right) for each in bins)
    return apart / max(len(pairs), 1)


def _newton(pairs: Pairs, *, offset: bool) -> Fit:
    """Fit slope and offset by Newton's method; without an offset it stays 0."""
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
    """Return the summed loss against the targets of the fit."""
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


RESAMPLES = 400
SURE = 0.95
"""Fraction of resamples in which a fit must be better."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Calibration errors before and after a fit, each with its standard error.

    A fit that learned how often the questions of its images were about nothing is not better: it
    makes the confidences of what is shown wrong.
    """

    objects: int
    right: int
    ece_before: float
    ece_before_error: float
    ece_after: float
    ece_after_error: float
    gain_error: float  # of the difference, as both vary together
    log_loss_before: float
    log_loss_after: float
    share_better: float  # fraction of the resamples
    shown_ece_before: float  # of objects whose names the images show
    shown_ece_after: float

    @property
    def is_better(self) -> bool:
        return (
            self.share_better >= SURE
            and self.log_loss_after <= self.log_loss_before
            and self.shown_ece_after <= self.shown_ece_before + self.gain_error
        )


def judge(fitted: Fit, found: Sequence[Scored], resamples: int = RESAMPLES) -> Judgement:
    """Judge a fit; its errors are bootstrapped over images, whose objects are alike."""
    by_image: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for each in found:
        by_image[each.image].append((each.score, each.right))
    choice, images = random.Random(0), range(len(by_image))
    drawn = [choice.choices(images, k=len(images)) for _ in range(resamples if images else 0)]
    before, after = (
        [_error([counted[index] for index in each]) for each in drawn]
        for counted in (
            [_counted(fit, some) for some in by_image.values()] for fit in (Fit(), fitted)
        )
    )
    gains = [b - a for b, a in zip(before, after, strict=True)]
    pairs = [(each.score, each.right) for each in found]
    shown = [(each.score, each.right) for each in found if each.shown]
    return Judgement(
        objects=len(pairs),
        right=sum(right for _, right in pairs),
        ece_before=calibration_error(Fit(), pairs),
        ece_before_error=_deviation(before),
        ece_after=calibration_error(fitted, pairs),
        ece_after_error=_deviation(after),
        gain_error=_deviation(gains),
        log_loss_before=log_loss(Fit(), pairs),
        log_loss_after=log_loss(fitted, pairs),
        share_better=sum(gain > 0 for gain in gains) / max(len(gains), 1),
        shown_ece_before=calibration_error(Fit(), shown),
        shown_ece_after=calibration_error(fitted, shown),
    )


def _counted(fitted: Fit, pairs: Pairs) -> tuple[int, tuple[tuple[int, float], ...]]:
    """Return an image's number of objects, and per bin the confidence's excess over truth."""
    bins = reliability(fitted, pairs)
    return len(pairs), tuple(
        (
            min(int(each.confidence * NUM_BINS), NUM_BINS - 1),
            each.count * (each.confidence - each.right),
        )
        for each in bins
    )


def _error(images: Sequence[tuple[int, tuple[tuple[int, float], ...]]]) -> float:
    excess = [0.0] * NUM_BINS
    for _, bins in images:
        for index, more in bins:
            excess[index] += more
    return sum(map(abs, excess)) / sum(count for count, _ in images)


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
