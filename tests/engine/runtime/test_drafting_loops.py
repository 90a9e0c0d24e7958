"""Loops of drafting steps on a CPU: the same answers, blocks and commits as by single ones."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from legato_engine.config import LOOKUP_DRAFT, EngineConfig
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.kernels.decode_loop import (
    DONE,
    STOP,
    DraftLoopTensors,
    control_drafting_step,
)
from legato_engine.runtime.sampler import successor_table
from legato_engine.sequence import Constraint, Sequence
from legato_engine.speculative.policy import CostTable, TokenBudgetPolicy

from benchmarks.decode.loops import Decodes, picture, question, randomly, skilled
from benchmarks.speculation.decode_paths import Answers, Paths, answer, both_paths, oracle, teach
from benchmarks.speculation.oracle import OracleProposer
from tests.loop_answers import Ask, EndsAtOnce, results

MOST = 4
SETTINGS = ("fixed:3", "seed", "budget")
COSTS = TokenBudgetPolicy(CostTable(((1, 1.0), (9, 1.2), (36, 1.9)), 0.1, 0.02))
SCRATCH = 9
TABLE = (Constraint(), Constraint(then=2), Constraint(then=1, on=8), Constraint(then=0, on=3))


@pytest.fixture(scope="module")
def plain():
    made = assemble(
        EngineConfig(
            device="cpu",
            threads=1,
            model="random-tiny",
            random_weights=True,
            max_running=MOST,
            draft=LOOKUP_DRAFT,
        )
    )
    yield made
    made.device.close()


class Drafting(NamedTuple):
    """Both paths with an oracle's drafts, by setting."""

    plain: Assembly
    oracle: OracleProposer
    by_setting: dict[str, Paths]


@pytest.fixture(scope="module")
def drafting(plain: Assembly) -> Drafting:
    known_by, proposer = oracle(plain, MOST)
    made = {setting: both_paths(plain, setting, proposer, COSTS) for setting in SETTINGS}
    return Drafting(plain, known_by, made)


def asked(assembly: Assembly, lengths: list[int]) -> list[Sequence]:
    """Questions, greedy and sampled in turns."""
    return [question(assembly, index, length) for index, length in enumerate(lengths)]


def single(drafting: Drafting, lengths: list[int], rate: float) -> Answers:
    """Plain answers, which the oracle drafts from now on."""
    sequences = asked(drafting.plain, lengths)
    answers = answer(drafting.plain, sequences, lengths)
    teach(drafting.oracle, sequences, answers, rate)
    return answers


@settings(max_examples=6)
@given(
    setting=st.sampled_from(SETTINGS),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=MOST),
    rate=st.sampled_from([0.0, 0.5, 0.8, 0.95, 1.0]),
    depth=st.sampled_from([1, 2]),
)
def test_answers_and_blocks_are_those_of_single_steps(
    drafting: Drafting, setting: str, lengths: list[int], rate: float, depth: int
) -> None:
    """Whatever the drafts are worth, and with as many steps or more, one for each loop's end."""
    wanted = single(drafting, lengths, rate)
    paths = drafting.by_setting[setting]
    by_steps, by_loops = (answer(path, asked(path, lengths), lengths, depth) for path in paths)
    assert by_steps.tokens == by_loops.tokens == wanted.tokens
    assert by_steps.blocks == by_loops.blocks
    assert by_loops.run.launches <= by_steps.run.launches


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_lone_answer_is_one_launch(drafting: Drafting, setting: str) -> None:
    """Its end is on the device, so that nothing is launched behind it."""
    single(drafting, [60], 0.8)
    path = drafting.by_setting[setting].loop
    answers = answer(path, asked(path, [60]), [60])
    assert answers.run.launches == 1
    assert max(answers.blocks[0]) > 1


def test_every_skill_comes_to_the_same(plain: Assembly) -> None:
    """Rows that draft beside rows with constraints and values, which do not."""
    paths = both_paths(plain, "fixed:3")
    kinds = [Ask(kind % 7, 20 + kind, logprobs=kind % 2 > 0, after=kind) for kind in range(7)]
    by_steps, _ = results(paths.graph, kinds, 2)
    by_loops, run = results(paths.loop, kinds, 2)
    assert by_loops == by_steps
    assert run.launches < run.steps


def test_a_loop_whose_answers_have_ended_runs_no_step(
    plain: Assembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list that ends with its first token is known to be empty before its loop begins."""
    steps = list[DraftLoopTensors]()

    def control(loop: DraftLoopTensors) -> bool:
        steps.append(loop)
        return control_drafting_step(loop)

    monkeypatch.setattr("legato_engine.runtime.loops.control_drafting_step", control)
    looping = both_paths(plain, "fixed:3").loop
    for ends in (True, False):
        sequence = skilled(looping, picture(looping), 0, 30)
        if ends:
            sequence.task = EndsAtOnce(sequence.task)
        run = Decodes(looping, at_once=1)
        del steps[:]
        run.scheduler.submit(sequence)
        run.scheduler.drain()
        assert run.launches == 1
        assert (len(steps) == 0) == ends


def test_requests_come_and_go(plain: Assembly) -> None:
    """Arrivals and aborts at any step."""
    totals = randomly(both_paths(plain, "seed").loop, num_steps=70, seed=5)
    assert totals["different"] == 0
    assert totals["aborted"] > 0
    assert totals["launches"] < 0.95 * totals["steps"]


def test_scarce_pages_end_loops_and_no_answer(drafting: Drafting) -> None:
    """With pages for few answers requests are preempted, and blocks are small."""
    lengths = [60, 50, 60, 40]
    wanted = single(drafting, lengths, 0.8)
    path = drafting.by_setting["seed"].loop
    scarce = dataclasses.replace(path, num_pages=12)
    answers = answer(scarce, asked(scarce, lengths), lengths)
    assert answers.tokens == wanted.tokens
    stats = answers.run.scheduler.load().kv
    assert stats is not None
    assert stats.preemptions > 0


def test_an_unforeseen_end_stops_a_loop(drafting: Drafting) -> None:
    """The host finds it among the tokens of a step; the others go on."""
    lengths = [50, 20]
    wanted = single(drafting, lengths, 1.0)
    path = drafting.by_setting["fixed:3"].loop
    answers = answer(path, asked(path, lengths), [50, 40])  # of which it ends after 20
    assert answers.tokens == wanted.tokens


def loop_of(**changed: object) -> DraftLoopTensors:
    """Three rows, of which the second was not fed, and one of padding; all may go on."""
    fields: dict[str, object] = {
        "row_B": torch.tensor([2, 0, 1, SCRATCH]),
        "room_B": torch.tensor([3, 3, -1, 7]),
        "reach_B": torch.tensor([20, 0, 8, 0]),
        "start_B": torch.tensor([0, 2, 2, 3]),
        "count_B": torch.tensor([2, 0, 1, 0]),
        "position_R": torch.tensor([50, 7, 16]),
        "limit_R": torch.tensor([49, 30, 30]),
        "token_B": torch.tensor([5, 8, 3, -1, -1]),
        "constraint_B": torch.tensor([1, 1, 3, 1]),
        "successor_C2": successor_table(TABLE),
        "outputs_N": torch.arange(32, dtype=torch.uint8),
        "limit": torch.tensor([9]),
        "step": torch.zeros(1, dtype=torch.int64),
        "ring_SN": torch.zeros(4, 32, dtype=torch.uint8),
        "words": torch.zeros(2, dtype=torch.int64),
        "scratch_row": SCRATCH,
    }
    return DraftLoopTensors(**{**fields, **changed})  # type: ignore[arg-type]  # by name


def test_a_control_step_publishes_and_leads_constraints_by_every_token() -> None:
    """Those of rows without tokens stay."""
    loop = loop_of()
    assert control_drafting_step(loop)
    assert loop.constraint_B.tolist() == [1, 1, 0, 1]  # 1 -> 2 -> 1 by 5 and 8; 3 -> 0 by 3
    assert loop.ring_SN[0].tolist() == list(range(32))
    assert int(loop.words[DONE]) == int(loop.step) == 1


@pytest.mark.parametrize(
    ("changed", "follows"),
    [
        ({}, True),
        ({"limit": torch.tensor([1])}, False),
        ({"reach_B": torch.tensor([19, 0, 8, 0])}, False),  # three draft tokens need 20
        ({"limit_R": torch.tensor([49, 30, 18]), "reach_B": torch.tensor([19, 0, 8, 0])}, True),
        ({"reach_B": torch.tensor([20, 0, 7, 0])}, False),
        ({"limit_R": torch.tensor([49, 30, 15])}, False),  # its last token
        ({"token_B": torch.tensor([5, -1, 3, 0, 0])}, False),
        ({"token_B": torch.tensor([5, 8, -1, 0, 0])}, False),
        ({"count_B": torch.tensor([0, 0, 0, 0])}, False),
    ],
)
def test_what_ends_a_loop(changed: dict[str, object], follows: bool) -> None:
    """Any row's last token, bad token, or lack of positions for a block; or no row with tokens."""
    assert control_drafting_step(loop_of(**changed)) == follows


def test_the_host_ends_a_loop() -> None:
    loop = loop_of()
    loop.words[STOP] = 1
    assert not control_drafting_step(loop)
