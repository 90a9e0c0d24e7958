"""The study of how close bins must be to count."""

import numpy as np
import pytest
import torch
from legato_client import Box
from legato_client.calibration.scored import LabelledImage
from legato_engine.kernels.reference import concentration
from legato_training.reach import OCTAVES, PLACES, PRESENT, Question, keep, kept, masses, study


def test_masses_are_the_engine_s_concentrations():
    """Of one head; of two their product."""
    logits = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(1)) * 3
    best = logits.argmax(-1)
    whole = concentration(logits, best, 4).prod(-1)
    assert masses(logits, [4.2, 1000.0])[:, 0].tolist() == pytest.approx(whole.tolist(), rel=1e-5)
    assert masses(logits, [1000.0])[:, 0].tolist() == pytest.approx([1.0] * 5)


def questions(count):
    """Boxes whose concentration with the present reach alone says whether they are right."""
    rng, right, wrong = np.random.default_rng(2), Box(0.1, 0.1, 0.5, 0.5), Box(0.6, 0.6, 0.9, 0.9)
    for number in range(count):
        near = rng.uniform(0.3, 0.9, (3, len(PLACES)))
        near[2] = near[2, PRESENT[1]]
        chance = float(near[:2, PRESENT[0]].prod() * near[2, PRESENT[1]])
        picture = LabelledImage(None, number, {"cup": (right,)})
        is_right = rng.uniform() < chance
        yield Question(picture, "cup", [right if is_right else wrong], np.ones(3), near)


def test_the_best_reach_is_found_on_the_fit_s_half(tmp_path, monkeypatch):
    """And what was kept in a file is what was asked."""
    monkeypatch.setattr("legato_training.reach.RESAMPLES", 5)
    some = {("fit", "detect"): list(questions(400)), ("test", "detect"): list(questions(200))}
    keep(tmp_path / "answers.gz", some)
    folders = {
        name: tuple(each.picture for each in some[name, "detect"]) for name in ("fit", "test")
    }
    read = kept(tmp_path / "answers.gz", folders)
    found = study(read["fit", "detect"], read["test", "detect"], "detect")
    assert found["best"]["place"] == PLACES[PRESENT[0]]
    assert len(found["fit"]) == len(PLACES) * len(OCTAVES)
    assert found["held_out"]["best"]["log_loss"] < found["held_out"]["existence_alone"]["log_loss"]
