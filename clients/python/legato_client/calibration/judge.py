"""Whether a fit betters confidences on pictures that it was not fitted on."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from legato_client.calibration.fit import (
    NUM_BINS,
    Fit,
    Pairs,
    calibration_error,
    log_loss,
    reliability,
)
from legato_client.calibration.scored import Scored

RESAMPLES = 400
SURE = 0.95
"""The share of resamples in which a fit must be better."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Calibration errors before and after a fit, each with its standard error."""

    objects: int
    right: int
    ece_before: float
    ece_before_error: float
    ece_after: float
    ece_after_error: float
    gain_error: float  # of the difference of both, which vary together
    log_loss_before: float
    log_loss_after: float
    share_better: float  # of the resamples

    @property
    def better(self) -> bool:
        return self.share_better >= SURE and self.log_loss_after <= self.log_loss_before


def judge(fitted: Fit, found: Sequence[Scored], resamples: int = RESAMPLES) -> Judgement:
    """Errors are by the bootstrap over pictures: objects of one picture are alike."""
    by_picture: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for each in found:
        by_picture[each.picture].append((each.score, each.right))
    choice, pictures = random.Random(0), range(len(by_picture))
    drawn = [choice.choices(pictures, k=len(pictures)) for _ in range(resamples if pictures else 0)]
    before, after = (
        [_error([counted[index] for index in each]) for each in drawn]
        for counted in (
            [_counted(fit, some) for some in by_picture.values()] for fit in (Fit(), fitted)
        )
    )
    gains = [b - a for b, a in zip(before, after, strict=True)]
    pairs = [(each.score, each.right) for each in found]
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
    )


def _counted(fitted: Fit, pairs: Pairs) -> tuple[int, tuple[tuple[int, float], ...]]:
    """The number of objects of a picture, and by how much confidence exceeds truth in its bins."""
    bins = reliability(fitted, pairs)
    return len(pairs), tuple(
        (
            min(int(each.confidence * NUM_BINS), NUM_BINS - 1),
            each.count * (each.confidence - each.right),
        )
        for each in bins
    )


def _error(pictures: Sequence[tuple[int, tuple[tuple[int, float], ...]]]) -> float:
    """The calibration error of all together."""
    excess = [0.0] * NUM_BINS
    for _, bins in pictures:
        for index, more in bins:
            excess[index] += more
    return sum(map(abs, excess)) / sum(count for count, _ in pictures)


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
