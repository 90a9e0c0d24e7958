"""Whether a fit betters confidences on pictures that it was not fitted on."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from legato_client.calibration.fit import Fit, Pairs, calibration_error, log_loss
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
    pictures, choice = list(by_picture.values()), random.Random(0)
    before, after = [], []
    for _ in range(resamples if pictures else 0):
        drawn: Pairs = [pair for some in choice.choices(pictures, k=len(pictures)) for pair in some]
        before.append(calibration_error(Fit(), drawn))
        after.append(calibration_error(fitted, drawn))
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


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
