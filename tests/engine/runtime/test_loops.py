"""Loops of decode and drafting steps on a CPU, and the polls of their outputs."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from legato_engine.config import LOOKUP_DRAFT, EngineConfig, check
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.errors import InvalidField
from legato_engine.kernels.decode_loop import (
    DONE,
    NOT_BEHIND,
    STOP,
    DraftLoopTensors,
    LoopTensors,
    advance,
    follow,
    place_behind,
)
from legato_engine.runtime import loops
from legato_engine.runtime.backend import Needs
from legato_engine.runtime.loops import PollTimer
from legato_engine.runtime.sampler import successor_table
from legato_engine.scheduler.interfaces import LoopPoll, sleep
from legato_engine.sequence import Constraint, Sequence
from legato_engine.speculation import CostTable, TokenBudgetPolicy

from benchmarks.decode.loops import Decodes, picture, question, randomly, recorded, skilled
from benchmarks.speculation.drafting_paths import Answers as DraftedAnswers
from benchmarks.speculation.drafting_paths import Paths, answer, both_paths, oracle, teach
from benchmarks.speculation.oracle import OracleProposer
from benchmarks.speculation.run import with_settings
from tests.fakes import successor
from tests.loop_answers import Ask, EndsAtOnce, Tolerant, results

# ---------------------------------------------------------------- decode loops
# Loops on a CPU: the same answers, in few launches, and the control step as specified.

SCRATCH = 9
TABLE = (Constraint(), Constraint(then=2), Constraint(then=1, on=8), Constraint(then=0, on=3))

Answers = tuple[list[list[int]], int]


@pytest.fixture(scope="module")
def graph():
    made = assemble(
        EngineConfig(
            device="cpu",
            threads=1,
            model="random-tiny",
            random_weights=True,
            max_running=6,
            max_prefill_rows=3,
        )
    )
    yield made
    made.device.close()


@pytest.fixture(scope="module")
def looping(graph: Assembly) -> Assembly:
    return with_settings(graph, decode_path="loop")


def answers(assembly: Assembly, lengths: list[int], num_failures: int = 0) -> Answers:
    """The tokens of some answers at once, and the number of decodes."""
    sequences = [question(assembly, index, length) for index, length in enumerate(lengths)]
    tasks = recorded(sequences)
    run = Tolerant(assembly, at_once=len(lengths))
    for sequence in sequences:
        run.scheduler.submit(sequence)
    run.scheduler.drain()
    assert len(run.failures) == num_failures
    return [task.tokens for task in tasks], run.launches


def test_answers_are_those_of_single_steps(graph: Assembly, looping: Assembly) -> None:
    lengths = [40, 7, 40, 23]
    plain, num_steps = answers(graph, lengths)
    looped, num_loops = answers(looping, lengths)
    assert looped == plain
    assert [len(tokens) for tokens in looped] == lengths
    assert num_steps >= max(lengths) - 1
    assert num_loops <= 3 * len(lengths)


ASKS = st.builds(
    Ask, st.integers(0, 6), st.integers(1, 30), st.booleans(), st.sampled_from([0, 0, 1, 3, 9])
)


@settings(max_examples=12)
@given(asked=st.lists(ASKS, min_size=1, max_size=6), depth=st.sampled_from([1, 2]))
def test_every_skill_comes_to_the_same(
    graph: Assembly, looping: Assembly, asked: list[Ask], depth: int
) -> None:
    """Tokens, values, log-probabilities, events, ends and results, in any company."""
    plain, _ = results(graph, asked, depth)
    looped, _ = results(looping, asked, depth)
    assert looped == plain


@pytest.mark.parametrize("kind", range(5))
@pytest.mark.parametrize("depth", [1, 2])
def test_every_skill_runs_in_loops(looping: Assembly, kind: int, depth: int) -> None:
    """With values and log-probabilities, a lone answer is one launch."""
    _, run = results(looping, [Ask(kind, 30, logprobs=True, after=0)], depth)
    assert run.steps > 1
    assert run.launches == 1


def test_the_loop_of_an_empty_list_ends(looping: Assembly) -> None:
    """It begins before the list's first token is read, which is its end."""
    sequence = skilled(looping, picture(looping), 0, 250)
    sequence.task = task = EndsAtOnce(sequence.task)
    run = Decodes(looping, at_once=1)
    run.scheduler.submit(sequence)
    run.scheduler.drain()
    assert len(task.tokens) == 1
    assert run.launches == 1
    assert run.steps < 200


def test_a_short_answer_is_no_loop(looping: Assembly) -> None:
    _, run = results(looping, [Ask(4, 4, logprobs=False, after=0)], 2)
    assert run.launches == run.steps > 1


def test_a_prompt_joins_the_rows_of_the_loop_that_it_ends(
    graph: Assembly, looping: Assembly
) -> None:
    """One launch has both, and all answers are those of single steps."""
    asked = [Ask(6, 200, logprobs=True, after=0), Ask(5, 8, logprobs=False, after=30)]
    plain, _ = results(graph, asked, 2)
    looped, run = results(looping, asked, 2)
    assert looped == plain
    assert any(plan.behind and plan.prefills for plan in run.plans)


def test_requests_come_and_go(looping: Assembly) -> None:
    totals = randomly(looping, num_steps=200, seed=5)
    assert totals["different"] == 0
    assert totals["aborted"] > 0
    assert totals["launches"] < totals["steps"]  # how many of them depends on the threads


def test_a_token_that_is_not_finite_ends_its_request_alone(
    graph: Assembly, looping: Assembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop ends with it, and the others go on."""
    plain, _ = answers(graph, [20, 20])
    broken = iter([False] * 5 + [True])
    step = LoopTensors.control_step

    def control(loop: LoopTensors) -> bool:
        if next(broken, False):
            loop.token_B[0] = -1
        return step(loop)

    monkeypatch.setattr(LoopTensors, "control_step", control)
    looped, num_loops = answers(looping, [20, 20], num_failures=1)
    assert looped[0] == plain[0][: len(looped[0])]
    assert len(looped[0]) < 20
    assert looped[1] == plain[1]
    assert num_loops > 1


def loop_of(limit: int) -> LoopTensors:
    """Two rows and one of padding."""
    return LoopTensors(
        row_B=torch.tensor([0, 1, SCRATCH]),
        position_B=torch.tensor([3, 5, 0]),
        fresh_B=torch.tensor([3, 5, 0]),
        sample_position_B=torch.tensor([3, 5, 0]),
        token_B=torch.tensor([7, 8, -1]),
        constraint_B=torch.tensor([0, 1, 0]),
        successor_C2=successor_table(TABLE),
        outputs_N=torch.arange(32, dtype=torch.uint8),
        limit=torch.tensor([limit]),
        step=torch.zeros(1, dtype=torch.int64),
        ring_SN=torch.zeros(4, 32, dtype=torch.uint8),
        words=torch.zeros(2, dtype=torch.int64),
        scratch_row=SCRATCH,
    )


def test_a_control_step_publishes_and_advances() -> None:
    """All outputs; padding stays, and its token is not looked at."""
    loop = loop_of(limit=3)
    assert [loop.control_step() for _ in range(3)] == [True, True, False]
    assert loop.position_B.tolist() == loop.fresh_B.tolist() == [6, 8, 0]
    assert loop.sample_position_B.tolist() == [6, 8, 0]
    assert loop.ring_SN[:3].tolist() == [list(range(32))] * 3
    assert not loop.ring_SN[3].any()
    assert int(loop.words[DONE]) == 3


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([-1, 0, 3, 8])), min_size=1))
def test_a_control_step_leads_constraints_by_the_table(
    cases: list[tuple[int, int]],
) -> None:
    """As the specification of the table does, whatever token came."""
    constraints, tokens = (torch.tensor(each) for each in zip(*cases, strict=True))
    advance(successor_table(TABLE), constraints, tokens)
    assert constraints.tolist() == [successor(TABLE, *case) for case in cases]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 2)), min_size=1),
    st.lists(st.sampled_from([-1, 0, 3, 8]), min_size=3, max_size=3),
)
def test_constraints_follow_the_tokens_of_the_launch_before(
    cases: list[tuple[int, int]], before: list[int]
) -> None:
    """Each its own token; one without a token stays."""
    constraints, after = (torch.tensor(each) for each in zip(*cases, strict=True))
    follow(successor_table(TABLE), constraints, torch.tensor(before), after)
    assert constraints.tolist() == [
        constraint if index < 0 else successor(TABLE, constraint, before[index])
        for constraint, index in cases
    ]


def test_tokens_behind_a_loop_are_placed_where_it_ended() -> None:
    """A row that has gone past its last position becomes padding; other tokens stay."""
    staged = {
        "row": torch.tensor([4, 5, 6, SCRATCH]),
        "source": torch.tensor([4, 5, -1, SCRATCH]),
        "position": torch.tensor([20, 30, 7, 0]),
        "fresh": torch.tensor([20, 30, 7, 1]),
        "sample_row": torch.tensor([4, 5, 6, SCRATCH]),
        "sample_position": torch.tensor([0, 0, 8, 0]),
    }
    next_B = torch.tensor([31, 99, 20, 0])
    place_behind(staged, next_B, torch.tensor([2, 0, NOT_BEHIND, NOT_BEHIND]), SCRATCH)
    assert {name: field.tolist() for name, field in staged.items()} == {
        "row": [4, SCRATCH, 6, SCRATCH],
        "source": [4, SCRATCH, -1, SCRATCH],
        "position": [20, 0, 7, 0],
        "fresh": [20, 1, 7, 1],
        "sample_row": [4, SCRATCH, 6, SCRATCH],
        "sample_position": [21, 1, 8, 0],
    }


def test_the_host_ends_a_loop() -> None:
    loop = loop_of(limit=3)
    loop.words[STOP] = 1
    assert not loop.control_step()


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (EngineConfig(cuda_graphs=False), "resident"),
        (EngineConfig(cuda_graphs=False), "loop"),
    ],
)
def test_what_excludes_a_path(config: EngineConfig, path: str) -> None:
    check(config)
    with pytest.raises(InvalidField, match="decode_path"):
        check(msgspec.structs.replace(config, decode_path=path))


class Unfinished:
    """Of a loop that is in a step."""

    def query(self) -> bool:
        return False

    def wait(self) -> None:
        raise AssertionError("it never ends")

    def time_ns(self) -> int:
        raise AssertionError("it never ends")


def test_a_wait_for_a_step_ends_when_its_pause_is_cut_short(looping: Assembly) -> None:
    loops = looping.runner._loops
    assert loops is not None
    needs = Needs(False, False, False)
    loops.start(0, 0, 0, looping.runner._resources.buckets[0], 0, 0, needs, common=False)
    pauses = list[float]()

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        return len(pauses) == 3

    assert loops.next_outputs(0, Unfinished(), pause) is LoopPoll.PENDING
    assert len(pauses) == 3
    assert loops.next_outputs(0, looping.device.compute.record(), sleep) is LoopPoll.FINISHED


# ---------------------------------------------------------------- drafting loops
# Loops of drafting steps on a CPU: the same answers, blocks and commits as by single ones.

MOST = 4
SETTINGS = ("fixed:3", "seed", "budget")
COSTS = TokenBudgetPolicy(CostTable(((1, 1.0), (9, 1.2), (36, 1.9)), 0.1, 0.02))


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


def single(drafting: Drafting, lengths: list[int], rate: float) -> DraftedAnswers:
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


def test_every_skill_comes_to_the_same_with_drafts(plain: Assembly) -> None:
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
    steps, step = list[DraftLoopTensors](), DraftLoopTensors.control_step

    def control(loop: DraftLoopTensors) -> bool:
        steps.append(loop)
        return step(loop)

    monkeypatch.setattr(DraftLoopTensors, "control_step", control)
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


def test_requests_come_and_go_with_drafts(plain: Assembly) -> None:
    """Arrivals and aborts at any step."""
    totals = randomly(both_paths(plain, "seed").loop, num_steps=70, seed=5)
    assert totals["different"] == 0
    assert totals["aborted"] > 0
    assert totals["launches"] < totals["steps"]


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


def drafting_loop_of(**changed: object) -> DraftLoopTensors:
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
    loop = drafting_loop_of()
    assert loop.control_step()
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
    assert drafting_loop_of(**changed).control_step() == follows


def test_the_host_ends_a_drafting_loop() -> None:
    loop = drafting_loop_of()
    loop.words[STOP] = 1
    assert not loop.control_step()


# ---------------------------------------------------------------- polls


class Clock:
    """Stands in for `time`."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(loops, "time", clock)
    return clock


def first_pauses(timer: PollTimer) -> tuple[float, float, float]:
    first, second, third = itertools.islice(timer.pauses(), 3)
    return first, second, third


def test_most_of_a_step_passes_without_a_look(clock: Clock) -> None:
    """As long as the step before took; after that polls are frequent."""
    timer = PollTimer()
    for _ in range(2):
        timer.found()
        clock.now += 0.002
    clock.now -= 0.001
    first, second, third = first_pauses(timer)
    assert 0.0002 < first < 0.001
    assert second == third < 1e-4
    clock.now += 0.0008
    assert first_pauses(timer) == (second, second, second)


def test_the_wait_for_a_first_step_is_no_length_of_a_step(clock: Clock) -> None:
    """It may hold a prefill in front; the host would sleep through the steps after it."""
    timer = PollTimer()
    timer.found()
    clock.now += 1.0
    timer.found()
    timer.begin()
    clock.now += 1.0
    timer.found()
    first, second, _ = first_pauses(timer)
    assert first == second
