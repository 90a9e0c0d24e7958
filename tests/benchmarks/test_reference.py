"""The comparison with the open reference: its cases, its rules of equality, its verdict."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from legato_engine.models.moondream.tasks import Allow, constraint_table
from legato_engine.types import (
    Box,
    DetectResult,
    FinishReason,
    ObjectEvent,
    PointResult,
    QueryResult,
)
from PIL import Image

from benchmarks import reference
from benchmarks.reference import report
from benchmarks.reference.cases import SIZES, cases
from benchmarks.reference.compare import Errors, Score, bins_apart, box_error, comparable
from benchmarks.reference.ours import Answer, Engine
from benchmarks.reference.theirs import Pass, Trace
from benchmarks.reference.weights import (
    ANSWER,
    COORD,
    EOS,
    FAMILIES,
    SIZE,
    make_config,
    write_checkpoint,
)

CHECKOUT = os.environ.get("MOONDREAM_REFERENCE", "")
NOTHING = (0.0, 0.0)
DETECT = (Allow.DETECT_X, Allow.DETECT_Y, Allow.DETECT_SIZE)
POINT = (Allow.POINT_X, Allow.POINT_Y)


def words(*ids):
    """Return tokens without values."""
    return [(token, NOTHING) for token in ids]


def traced(*ids, prompt=(1, 2)):
    """Return a trace with these ids after its prompt."""
    fed = [words(*prompt), *([token] for token in words(*ids))]
    return Trace([Pass(tuple(each), torch.zeros(len(each), 2), torch.zeros(4)) for each in fed])


def answered(*ids, finish=FinishReason.STOP, result=None):
    """Return the engine's answer of these ids."""
    return Answer(tuple(words(1, 2)), tuple(words(*ids)), result or QueryResult(answer=""), finish)


def test_every_skill_is_asked_about_many_images():
    """There are two hundred prompts and twenty sizes at least, with every skill."""
    asked = [case for family in FAMILIES for case in reference.questions("tiny", family, SIZES)]
    assert len(asked) >= 200
    assert len({case.size for case in asked} - {None}) == len(SIZES) >= 20
    kinds = {case.skill for case in asked}
    assert {"caption short", "caption normal", "caption long", "detect", "point"} <= kinds
    assert {f"query{more}" for more in ("", " with references", " without an image")} <= kinds
    assert {f"reasoning{more}" for more in ("", " with references", " without an image")} <= kinds


def test_the_engines_last_token_is_no_difference():
    """EOS is sampled by both and fed back by neither: only the engine lists it."""
    assert comparable(traced(30, 31), answered(30, 31, EOS), 9) == (words(30, 31),) * 2
    theirs, ours = comparable(traced(30, 31), answered(30, EOS), 9)
    assert theirs != ours


def test_budgets_are_no_difference():
    """Nothing is compared after the reference's budgets; everything is before."""
    more = answered(30, 31, 32, 33, finish=FinishReason.LENGTH)
    assert comparable(traced(30, 31), more, 2) == (words(30, 31),) * 2
    theirs, ours = comparable(traced(30, 31), more, 3)
    assert len(ours) > len(theirs)
    thoughts = traced(30, 31, ANSWER, ANSWER, 40)
    longer = answered(30, 31, 32, ANSWER, ANSWER, 41, finish=FinishReason.LENGTH)
    assert comparable(thoughts, longer, 2) == (words(30, 31),) * 2


def test_a_difference_is_counted_and_shown():
    """One token that differs makes a case differ, and is kept with its index."""
    case = cases("text", SIZES[:1])[0]
    score = Score()
    score.add(case, traced(30, 31, 32), answered(30, 7, 32, EOS), 9)
    score.add(case, traced(30, 31), answered(30, 31, EOS), 9)
    score.add(case, traced(30, 31), answered(30, 31, 32, EOS), 9)
    assert (score.cases, score.equal, score.same_prompt) == (3, 1, 3)
    assert [each["at"] for each in score.differing] == [1, 2]
    assert score.agreed == 1 + 2 + 2


def test_boxes_are_compared_within_the_image():
    """The reference's boxes may exceed the image; a missing box is a difference."""
    trace = Trace(objects=[{"x_min": -0.25, "y_min": 0.5, "x_max": 0.5, "y_max": 1.5}])
    box = Box(x_min=0.0, y_min=0.5, x_max=0.75, y_max=1.0)
    assert box_error(trace, DetectResult(objects=(ObjectEvent(box=box, label="cup"),))) == 0.25
    assert box_error(trace, DetectResult(objects=())) == float("inf")
    assert box_error(Trace(), PointResult(points=())) == 0.0


def test_bins_count_what_a_value_can_be():
    """Neighbouring coordinates and neighbouring sizes are one bin apart."""
    assert bins_apart(COORD, (5 / 1024, 0.0), (6 / 1024, 0.0)) == 1
    sizes = [2 ** (at / 1023 * 10 - 10) for at in (1000, 1001, 3)]
    assert bins_apart(SIZE, (sizes[0], sizes[2]), (sizes[1], sizes[2])) == 1
    assert bins_apart(SIZE, (sizes[0], sizes[2]), (sizes[0], sizes[2])) == 0


def passing():
    """Return the figures of a run in which everything is equal."""
    errors, score = Errors(), Score()
    errors.add("prefill hidden", torch.ones(2, 3), torch.ones(2, 3))
    score.add(cases("text", SIZES[:1])[0], traced(30), answered(30, EOS), 9)
    return {"errors": errors.figures(), "skills": {"x": score.figures()}, "bins_apart": {"0": 4}}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda run: run["errors"]["prefill hidden"].update(max=2e-4),
        lambda run: run["skills"]["x"].update(equal=0),
        lambda run: run["skills"]["x"].update(same_prompt=0),
        lambda run: run["skills"]["x"].update(box_error=0.001),
        lambda run: run["bins_apart"].update({"1": 1}),
    ],
)
def test_float32_passes_only_as_a_whole(spoil):
    """Each comparison can fail a float32 run; bfloat16 is never called exact."""
    run = passing()
    assert report.passes("tiny/f32", run)
    spoilt = copy.deepcopy(run)
    spoil(spoilt)
    assert not report.passes("tiny/f32", spoilt)
    assert report.passes("tiny/bf16", spoilt)


def test_the_engine_replays_its_own_answers(tmp_path):
    """A replay of the scheduler's answer gives the same tokens again."""
    family = FAMILIES[-1]
    folder = write_checkpoint(make_config("tiny", 1, 1, family), family, 0, tmp_path / "model")
    engine = Engine(folder, "f32", 1, torch.device("cpu"))
    try:
        asked = cases(family.name, [(60, 40)])
        image = engine.prepare(Image.effect_noise((60, 40), 90).convert("RGB"), (60, 40))
        answers = engine.answers(asked, {(60, 40): image}, lambda case: 12)
        constraints = constraint_table(make_config("tiny", 1, 1, family))
        for case, answer in zip(asked, answers, strict=True):
            fed = [[token] for token in answer.tokens[:-1]]
            cycle = (DETECT if case.skill == "detect" else POINT) * 12
            replayed = engine.replay(image, answer.prompt, fed)
            steps = zip(answer.tokens, replayed, cycle, strict=False)
            for (token, value), (hidden_TD, logits_V), rule in steps:
                ids = constraints[rule].allowed
                assert ids is not None
                assert ids[logits_V[list(ids)].argmax()] == token
                if token != EOS:
                    assert engine.value(hidden_TD[-1], token) == value
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="MOONDREAM_REFERENCE names no checkout of the reference")
def test_the_reference_agrees(tmp_path, monkeypatch):
    """On tiny float32 weights every skill gives the reference's numbers, tokens and boxes."""
    monkeypatch.setenv("LEGATO_RESULTS", str(tmp_path))
    few = ["--runs", "tiny/f32", "--sizes", "1", "--max-tokens", "4"]
    assert reference.main(["--checkout", CHECKOUT, *few]) == 0
    assert list(Path(tmp_path).iterdir())
