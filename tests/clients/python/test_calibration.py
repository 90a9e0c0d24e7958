"""Fits of confidences, and whether they help."""

from __future__ import annotations

import dataclasses
import json
import math
import random

import pytest
from legato_client import Box, Point
from legato_client._types.results import Token, TokenCertainty
from legato_client.calibration import scored
from legato_client.calibration.fit import (
    Fit,
    _counted,
    _error,
    calibration_error,
    fit,
    judge,
    log_loss,
    reliability,
)
from legato_client.calibration.scored import (
    Scored,
    UnusableLabels,
    certainties,
    product,
    read_labels,
    right_places,
)
from legato_engine.models.confidence import Calibration

# ---------------------------------------------------------------- fit
# Fits of confidences to how often they are right.


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


# ---------------------------------------------------------------- judge
# Whether a fit helps, with its error.

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


# ---------------------------------------------------------------- scored
# Labels, and what of the answers is right by them.

COCO = {
    "images": [
        {"id": 7, "file_name": "a.jpg", "width": 200, "height": 100},
        {"id": 8, "file_name": "b.jpg", "width": 10, "height": 10},
    ],
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 2, "bbox": [20, 10, 100, 50], "iscrowd": 0},
        {"id": 2, "image_id": 7, "category_id": 3, "bbox": [0, 0, 5, 5], "iscrowd": 1},
    ],
    "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}, {"id": 3, "name": "bus"}],
}


def test_labels_in_cocos_form(tmp_path):
    """Boxes are shares of the image; absent categories are asked for too, crowds are not."""
    (tmp_path / "annotations.json").write_text(json.dumps(COCO))
    labels = read_labels(tmp_path, tmp_path / "annotations.json", absent=5)
    first, second = labels
    assert first.path == tmp_path / "a.jpg"
    assert first.boxes == {"dog": (Box(0.1, 0.1, 0.6, 0.6),), "cat": ()}
    assert second.boxes == {"cat": (), "dog": (), "bus": ()}
    fewer = read_labels(tmp_path, tmp_path / "annotations.json", absent=0)
    assert [set(each.boxes) for each in fewer] == [{"dog"}, set()]


@pytest.mark.parametrize("text", ["", "[]", '{"images": []}'])
def test_unusable_labels(tmp_path, text):
    """A file of another form is named."""
    path = tmp_path / "labels.json"
    path.write_text(text)
    with pytest.raises(UnusableLabels, match=r"labels\.json"):
        read_labels(tmp_path, path, absent=1)
    with pytest.raises(UnusableLabels, match=r"missing\.json"):
        read_labels(tmp_path, tmp_path / "missing.json", absent=1)


def test_scores_of_whole_objects():
    """The product of an object's tokens; the end and a part of an object have none."""
    sure = [TokenCertainty(0.5, 0.8), TokenCertainty(1.0, 0.5), TokenCertainty(1.0, 1.0)]
    tokens = [Token(5, "", certainty=each) for each in (*sure, *sure, sure[0])]
    found = certainties([*tokens, Token(0, "")], 3)
    assert found == [((0.5, 0.8), (1.0, 0.5), (1.0, 1.0))] * 2
    assert [product(each) for each in found] == pytest.approx([0.2, 0.2])


def test_a_true_box_is_found_once():
    """The surest object takes it; others like it, and boxes that fit badly, are wrong."""
    truth = [Box(0.0, 0.0, 0.4, 0.4), Box(0.5, 0.5, 1.0, 1.0)]
    places = [Box(0.0, 0.0, 0.4, 0.3), Box(0.0, 0.0, 0.4, 0.4), Box(0.7, 0.7, 1.0, 1.0)]
    assert right_places(places, [0.9, 0.8, 0.7], truth) == [True, False, False]
    assert right_places(places, [0.8, 0.9, 0.7], truth) == [False, True, False]
    points = [Point(0.2, 0.2), Point(0.3, 0.3), Point(0.9, 0.9), Point(0.45, 0.45)]
    assert right_places(points, [0.5, 0.6, 0.7, 0.8], truth) == [False, True, True, False]
