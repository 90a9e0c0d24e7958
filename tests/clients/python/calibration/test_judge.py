"""Whether a fit helps, with its error."""

from __future__ import annotations

import dataclasses
import random

import pytest
from legato_client import Box, Point
from legato_client.calibration import scored
from legato_client.calibration.fit import Fit, _counted, _error, judge
from legato_client.calibration.scored import Scored

BOX = Box(0.0, 0.0, 0.5, 0.5)


def found(count, truth, per_image=4):
    """Objects, right with the chance that `truth` gives their score."""
    dice = random.Random(3)
    scores = [dice.uniform(0.02, 0.98) for _ in range(count)]
    return [
        Scored("detect", n // per_image, "cup", BOX, ((score, 1.0),), dice.random() < truth(score))
        for n, score in enumerate(scores)
    ]


@pytest.mark.parametrize(
    ("truth", "fitted", "better"),
    [
        (Fit(2.5), Fit(2.5), True),
        (Fit(), Fit(2.5), False),
        (Fit(), Fit(1.02), False),
        (Fit(2.5), Fit(), False),
    ],
)
def test_a_fit_must_be_better_by_more_than_chance(truth, fitted, better):
    """What scores were drawn by is better; the opposite, next to nothing and nothing are not."""
    judged = judge(fitted, found(1200, truth))
    assert judged.is_better is better
    assert judged.objects == 1200


def test_a_fit_that_learned_how_often_nothing_is_there_is_not_better():
    """It betters all objects together, half of them made up, and spoils those that are shown."""
    there = found(1200, Fit())
    made_up = [
        dataclasses.replace(each, image=each.image + 300, right=False, shown=False)
        for each in there
    ]
    judged = judge(Fit(1.0, -1.3), there + made_up)
    assert judged.ece_after < judged.ece_before / 2
    assert judged.log_loss_after < judged.log_loss_before
    assert judged.shown_ece_after > judged.shown_ece_before + 0.05
    assert not judged.is_better


def test_the_error_of_a_resample_is_the_calibration_error(monkeypatch):
    """Of the objects of its images, however they are counted."""
    monkeypatch.setattr(random.Random, "choices", lambda _, population, k: list(population))
    judged = judge(Fit(1.7, -0.4), found(300, Fit()), resamples=1)
    gain = judged.ece_before - judged.ece_after
    assert judged.share_better == (gain > 0)
    assert _error([_counted(Fit(1.7, -0.4), pairs) for pairs in images(found(300, Fit()))]) == (
        pytest.approx(judged.ece_after)
    )


def images(objects):
    return [
        [(each.score, each.right) for each in objects if each.image == number]
        for number in {each.image for each in objects}
    ]


def test_errors_grow_with_objects_that_are_alike():
    """Images are resampled, so many objects of one image tell little."""
    alone = judge(Fit(2.5), found(600, Fit(), per_image=1))
    copied = [each for each in found(60, Fit(), per_image=1) for _ in range(10)]
    together = judge(Fit(2.5), copied)
    assert together.ece_after_error > 1.5 * alone.ece_after_error
    assert judge(Fit(2.5), []).share_better == 0.0


def test_objects_survive_a_file(tmp_path):
    """Boxes and points, by the name of their set."""
    boxes = found(3, Fit())
    points = [Scored("point", 7, "red cup", Point(0.25, 0.5), ((0.5, 0.25), (1.0, 0.5)), True)]
    path = tmp_path / "objects.jsonl"
    lines = [*scored.lines("fit", boxes), *scored.lines("test", points)]
    path.write_text("".join(f"{line}\n" for line in lines))
    assert scored.read(path, "fit") == boxes
    assert scored.read(path, "test") == points
    assert points[0].score == 0.0625
