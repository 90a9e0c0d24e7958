"""Peers and contenders in processes of their own, and the comparison with the open reference."""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from legato_engine.models.moondream.tasks import Allow, constraint_table
from legato_engine.types import (
    DetectOutput,
    FinishReason,
    ImageBox,
    ObjectEvent,
    PointOutput,
    QueryOutput,
)
from PIL import Image

from benchmarks import peers, reference
from benchmarks.cpu import peers as cpu_peers
from benchmarks.cpu.peers import Entrant, Process
from benchmarks.peers import Peer
from benchmarks.reference import compare
from benchmarks.reference.cases import SIZES, cases
from benchmarks.reference.checkout import (
    ANSWER,
    COORD,
    EOS,
    FAMILIES,
    SIZE,
    make_config,
    write_checkpoint,
)
from benchmarks.reference.compare import Errors, Score, bins_apart, box_error, comparable
from benchmarks.reference.ours import Answer, Engine
from benchmarks.reference.theirs import Pass, Trace

PEER = Peer("stand_in", "a peer", 5.0)
ROW = """echo noise; echo '{"streams": 1, "step_ms": 2.5}';"""


def run_as(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, seconds: float = 60.0
) -> peers.Outcome:
    """Run a shell's `program` in the place of a peer's module."""
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\n{program}\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    return peers.run("torch", PEER, [], "", seconds)


def test_rows_are_read_among_other_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A peer's lines of JSON are its rows, among any other output."""
    outcome = run_as(monkeypatch, tmp_path, ROW)
    assert (outcome.status, outcome.rows) == ("ok", [{"streams": 1, "step_ms": 2.5}])


def test_a_failing_peer_keeps_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rows of a peer before its failure are kept, with the reason."""
    outcome = run_as(monkeypatch, tmp_path, ROW + "echo 'ValueError: no memory' >&2; exit 1")
    assert (outcome.status, outcome.reason) == ("failed", "ValueError: no memory")
    assert len(outcome.rows) == 1


def test_a_hanging_peer_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A peer that exceeds its limit is terminated and keeps its rows."""
    outcome = run_as(monkeypatch, tmp_path, ROW + "exec sleep 600", seconds=2.0)
    assert outcome.status == "timeout"
    assert len(outcome.rows) == 1


def test_figures_of_another_run_are_marked() -> None:
    """Where a peer is absent its earlier figures are separate from the rows, and marked."""
    outcome = peers.run("moondream", peers.PEERS["moondream"], [], "", 1.0)
    assert (outcome.status, outcome.rows) == ("absent", [])
    assert outcome.not_of_this_run
    assert peers.table([outcome], [1]).count("not of this run") == 2


# ---------------------------------------------------------------- peers
# Contenders on a CPU, in turns, in processes of their own.

STAND_IN = """
import sys
sys.path.insert(0, "benchmarks/cpu/peers")
import turn
class Fast:
    versions = {"fast": "1"}
    def prefill(self, prompt):
        print("noise of a library")
        return prompt[-1]
    def decode(self, prompts, steps):
        seconds = steps * len(prompts) / 100.0
        return seconds, 2 * seconds
turn.serve(Fast())
"""
FAST = Entrant("fast", "stand_in", ("", ""))


@pytest.fixture
def process():
    """A contender that decodes 100 tokens a second."""
    made = Process(FAST, [sys.executable, "-c", STAND_IN], {0})
    yield made
    made.end()


def test_turns_are_answered_among_other_output(process):
    """Rates are of tokens of all streams, and lines of libraries are no answers."""
    prompts = {"prefill": [[1, 2, 3]], "1 stream": [[4]], "4 streams": [[5], [6], [7], [8]]}
    found = cpu_peers._round([process], prompts, 20)["fast"]
    assert found["prefill"]["token"] == 3
    assert found["1 stream"]["per_second"] == pytest.approx(100.0)
    assert found["4 streams"]["per_second"] == pytest.approx(100.0)
    assert found["4 streams"]["cpu_ms"] == pytest.approx(20.0)


def test_a_contender_is_stopped_between_its_turns(process):
    """So its threads take no time from the others."""
    status = Path(f"/proc/{process.pid}/stat")
    deadline = time.monotonic() + 60
    while status.read_text().rpartition(") ")[2][0] != "T":
        assert time.monotonic() < deadline, "it runs"
        time.sleep(0.001)
    assert process.ask(kind="prefill", prompts=[[7]])["token"] == 7


def test_a_contender_that_does_not_start_says_why():
    """The last line of its errors."""
    with pytest.raises(RuntimeError, match="No module named 'llama_cpp_of_tests'"):
        Process(FAST, [sys.executable, "-c", "import llama_cpp_of_tests"], {0})


def test_a_comparison_takes_the_median_of_the_rounds_ratios():
    """Not the ratio of medians: both turns of a round met the same load. Absences have reasons."""
    ours, theirs = cpu_peers.PAIRS[0]
    speeds = [(3.0, 2.0), (0.3, 0.1), (1.0, 1.0)]
    rounds = [
        {
            name: {
                task: {"per_second": speed, "cpu_ms": 1.0 / speed, "token": 1.0}
                for task in cpu_peers.TASKS
            }
            for name, speed in zip((ours, theirs), pair, strict=True)
        }
        for pair in speeds
    ]
    options = argparse.Namespace(prompt=4, steps=2, weights=cpu_peers.FILE)
    two: Any = [SimpleNamespace(entrant=entrant, versions={}) for entrant in cpu_peers.ENTRANTS[:2]]
    figures = cpu_peers._figures(two, rounds, {"slow": "not here"}, options)
    assert figures["ratios"][f"{ours} / {theirs}"]["prefill"] == pytest.approx(
        {"median": 1.5, "least": 1.0, "most": 3.0, "by_cpu": 1.5}
    )
    assert figures["contenders"][ours]["tasks"]["prefill"] == pytest.approx(
        {"median": 1.0, "least": 0.3, "most": 3.0, "cpu_ms": 1.0}
    )
    assert figures["absent"] == {"slow": "not here"}
    assert any("1.50 (1.00-3.00) [1.50]" in line for line in cpu_peers._tables(figures))


def test_pairs_take_turns_at_being_first():
    """The second of a pair begins in every other round, and pairs stay together."""
    running: Any = [SimpleNamespace(entrant=entrant) for entrant in cpu_peers.ENTRANTS[:4]]
    first, second, third, fourth = running
    assert cpu_peers._order(running, 0) == [first, second, third, fourth]
    assert cpu_peers._order(running, 1) == [second, first, fourth, third]


# ---------------------------------------------------------------- reference
# The comparison with the open reference: its cases, its rules of equality, its verdict.

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
    return Answer(tuple(words(1, 2)), tuple(words(*ids)), result or QueryOutput(answer=""), finish)


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
    box = ImageBox(x_min=0.0, y_min=0.5, x_max=0.75, y_max=1.0)
    assert box_error(trace, DetectOutput(objects=(ObjectEvent(box=box, label="cup"),))) == 0.25
    assert box_error(trace, DetectOutput(objects=())) == float("inf")
    assert box_error(Trace(), PointOutput(points=())) == 0.0


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
    assert compare.passes("tiny/f32", run)
    spoilt = copy.deepcopy(run)
    spoil(spoilt)
    assert not compare.passes("tiny/f32", spoilt)
    assert compare.passes("tiny/bf16", spoilt)


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
