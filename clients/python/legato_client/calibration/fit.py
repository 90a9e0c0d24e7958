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
Targets = Sequence[tuple[float, float]]
"""Scores, and the chances to fit: 1 and 0 for the objects of `Pairs`."""


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
    targets = _targets(pairs)
    plain, moved = _newton(targets, offset=False), _newton(targets, offset=True)
    gain = (log_loss(plain, targets) - log_loss(moved, targets)) * len(pairs)
    return moved if gain > math.log(len(pairs)) / 2 else plain


def log_loss(fitted: Fit, targets: Targets) -> float:
    """Return the mean log loss in nats."""
    chances = ((min(max(fitted(score), _LEAST), 1 - _LEAST), target) for score, target in targets)
    logs = (target * math.log(c) + (1 - target) * math.log(1 - c) for c, target in chances)
    return -math.fsum(logs) / max(len(targets), 1)


def reliability(fitted: Fit, pairs: Pairs) -> list[Bin]:
    """Return bins of equal width, without the empty ones."""
    return [
        Bin(len(each), statistics.fmean(c for c, _ in each), statistics.fmean(r for _, r in each))
        for each in _binned(fitted, pairs)
        if each
    ]


def calibration_error(fitted: Fit, pairs: Pairs) -> float:
    """Return the ECE: the mean distance of confidence and accuracy over the bins, by counts."""
    return _error([_counted(fitted, pairs)])


def _binned(fitted: Fit, pairs: Pairs) -> list[list[tuple[float, bool]]]:
    """Return the confidences of each bin, and whether their objects were right."""
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(NUM_BINS)]
    for score, right in pairs:
        confidence = fitted(score)
        bins[min(int(confidence * NUM_BINS), NUM_BINS - 1)].append((confidence, right))
    return bins


def _counted(fitted: Fit, pairs: Pairs) -> tuple[int, list[float]]:
    """Return the number of objects, and for each bin by how much confidence exceeds truth."""
    bins = _binned(fitted, pairs)
    return len(pairs), [math.fsum(confidence - right for confidence, right in b) for b in bins]


def _error(images: Sequence[tuple[int, list[float]]]) -> float:
    excess = map(math.fsum, zip(*(bins for _, bins in images), strict=True))
    return math.fsum(map(abs, excess)) / max(sum(count for count, _ in images), 1)


def _newton(targets: Targets, *, offset: bool) -> Fit:
    """Fit slope and offset by Newton's method; without an offset it stays 0."""
    logits = [(_logit(score), target) for score, target in targets]
    slope, shift = 1.0, 0.0
    for _ in range(_STEPS):
        g_slope = g_shift = h_slope = h_both = h_shift = 0.0
        for logit, target in logits:
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


def _targets(pairs: Pairs) -> Targets:
    num_right = sum(right for _, right in pairs)
    high = (num_right + 1) / (num_right + 2)
    low = 1 / (len(pairs) - num_right + 2)
    return [(score, high if right else low) for score, right in pairs]


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


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
