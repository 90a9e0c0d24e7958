"""Fits of confidences to how often they are right."""

from __future__ import annotations

import math
import random

import pytest
from legato_client.calibration.fit import (
    Fit,
    calibration_error,
    fit,
    log_loss,
    reliability,
)
from legato_engine.models.confidence import Calibration


def drawn(count, truth, seed=0):
    """Scores, each right with the chance that `truth` gives it."""
    dice = random.Random(seed)
    scores = [1 / (1 + math.exp(-dice.gauss(1, 2))) for _ in range(count)]
    return [(score, dice.random() < truth(score)) for score in scores]


@pytest.mark.parametrize("truth", [Fit(2.5), Fit(0.5), Fit(1.5, -1.2), Fit()])
def test_what_scores_were_drawn_by_is_found_again(truth):
    """Temperature and offset are those of the chances, within what 5,000 objects tell."""
    found = fit(drawn(5000, truth))
    assert found.temperature == pytest.approx(truth.temperature, rel=0.15)
    assert found.offset == pytest.approx(truth.offset, abs=0.15)
    held_out = drawn(5000, truth, seed=1)
    assert calibration_error(found, held_out) < 0.03
    assert log_loss(found, held_out) <= log_loss(Fit(), held_out) + 1e-3


def test_an_offset_must_pay_for_itself():
    """Where a temperature explains all, there is none."""
    assert fit(drawn(2000, Fit(2.0))).offset == 0.0


@pytest.mark.parametrize("right", [True, False])
def test_sets_without_mistakes_or_hits(right):
    """The fit is finite, keeps the order, and does not claim certainty."""
    found = fit([(score, right) for score, _ in drawn(200, Fit())])
    assert found(0.2) < found(0.9) < 1.0
    assert 0 < found.temperature < math.inf


def test_the_calibration_error_of_known_bins():
    """The distance of confidence and share right, by the number of objects."""
    pairs = [(0.95, True)] * 3 + [(0.95, False)] + [(0.25, False)] * 4
    bins = reliability(Fit(), pairs)
    assert [(each.count, each.right) for each in bins] == [(4, 0.0), (4, 0.75)]
    assert calibration_error(Fit(), pairs) == pytest.approx((0.2 + 0.25) / 2)
    assert calibration_error(Fit(), []) == 0.0


@pytest.mark.parametrize("score", [0.0, 0.001, 0.5, 0.97, 1.0])
def test_the_engine_does_the_same(score):
    """A fit means in the engine what it means here."""
    assert Fit(1.7, -0.3)(score) == pytest.approx(Calibration(1.7, -0.3)(score), abs=1e-12)
