"""Loops on a CPU: the same answers, in few launches, and the control step as specified."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from legato_engine.config import EngineConfig, check
from legato_engine.core.assembly import Assembly, assemble, with_decode_path
from legato_engine.errors import InvalidField
from legato_engine.kernels.decode_loop import (
    DONE,
    NOT_BEHIND,
    STOP,
    LoopTensors,
    advance,
    control_step,
    follow,
    place_behind,
)
from legato_engine.runtime.backend import Needs
from legato_engine.runtime.sampler import successor_table
from legato_engine.scheduler.interfaces import LoopPoll, sleep
from legato_engine.sequence import Constraint

from benchmarks.decode.loops import Decodes, picture, question, randomly, recorded, skilled
from tests.fakes import successor
from tests.loop_answers import Ask, EndsAtOnce, Tolerant, results

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
    return with_decode_path(graph, "loop")


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
    assert totals["launches"] < 0.9 * totals["steps"]


def test_a_token_that_is_not_finite_ends_its_request_alone(
    graph: Assembly, looping: Assembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop ends with it, and the others go on."""
    plain, _ = answers(graph, [20, 20])
    broken = iter([False] * 5 + [True])
    step = control_step

    def control(loop: LoopTensors) -> bool:
        if next(broken, False):
            loop.token_B[0] = -1
        return step(loop)

    monkeypatch.setattr("legato_engine.runtime.loops.control_step", control)
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
    assert [control_step(loop) for _ in range(3)] == [True, True, False]
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
    assert not control_step(loop)


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
