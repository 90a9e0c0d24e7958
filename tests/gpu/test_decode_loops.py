"""Loops of decode steps on a GPU: one launch, with the bits of single steps.

Both in captured loops and in the megakernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import Assembly, assemble, with_decode_path, with_speculation

from benchmarks.decode.loops import Decodes, question, randomly, recorded
from tests.loop_answers import Ask, results

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def graph() -> Iterator[Assembly]:
    made = assemble(
        EngineConfig(device="cuda", decode_path="graph", max_running=9, crops_per_launch=0)
    )
    yield made
    made.device.close()


@pytest.fixture(scope="module", params=["loop", "resident"])
def looping(graph: Assembly, request: pytest.FixtureRequest) -> Assembly:
    made = with_decode_path(graph, request.param)
    assert made.runner.decodes_by_loops
    if request.param == "resident" and not made.runner.megakernel_rows:
        pytest.skip("needs a GPU of compute capability 9.0")
    return made


def test_loops_are_the_default_with_kernels(graph: Assembly) -> None:
    """Without kernels a step's bits depend on its number of rows."""
    auto = with_decode_path(graph, "auto")
    assert auto.runner.decodes_by_loops
    assert with_speculation(auto, "fixed:2").runner.decodes_by_loops
    by_torch = assemble(EngineConfig(device="cuda", dtype="f32", max_running=2, num_pages=200))
    assert not by_torch.runner.decodes_by_loops
    by_torch.device.close()


def answers(assembly: Assembly, lengths: list[int]) -> tuple[list[list[int]], int]:
    sequences = [question(assembly, index, length) for index, length in enumerate(lengths)]
    tasks = recorded(sequences)
    run = Decodes(assembly, at_once=len(lengths))
    for sequence in sequences:
        run.scheduler.submit(sequence)
    run.scheduler.drain()
    return [task.tokens for task in tasks], run.launches


@pytest.mark.parametrize("lengths", [[256], [256] * 8, [90, 7, 40, 23, 256]])
def test_answers_have_the_bits_of_single_steps(
    graph: Assembly, looping: Assembly, lengths: list[int]
) -> None:
    """Greedy and sampled; a lone answer of 256 tokens is one launch, whose end is one wait."""
    plain, _ = answers(graph, lengths)
    looped, num_loops = answers(looping, lengths)
    assert looped == plain
    assert num_loops <= 1 + 3 * (len(set(lengths)) - 1)


SKILLS = [Ask(kind, 40, logprobs=kind % 2 == 0, after=kind) for kind in range(5)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("asked", [*([ask] for ask in SKILLS), SKILLS + SKILLS[::-1]])
def test_every_skill_has_the_bits_of_single_steps(
    graph: Assembly, looping: Assembly, asked: list[Ask], depth: int
) -> None:
    """Tokens, values, log-probabilities, events, ends and results; a lone answer is one launch."""
    plain, _ = results(graph, asked, depth)
    looped, run = results(looping, asked, depth)
    assert looped == plain
    assert len(asked) > 1 or run.launches <= 1


def test_ten_thousand_short_steps_with_arrivals_and_aborts(looping: Assembly) -> None:
    totals = randomly(looping, num_steps=10_000, seed=11)
    assert totals["different"] == 0
    assert totals["aborted"] > 100


@pytest.mark.parametrize("late", range(7))
def test_a_prompt_joins_the_rows_of_the_loop_that_it_ends(
    graph: Assembly, looping: Assembly, late: int
) -> None:
    """One launch has both, and all answers have the bits of single steps.

    That holds whatever row it finds: the last comes when the answer of the first is about to end.
    """
    asked = [
        Ask(6, 200, logprobs=True, after=0),
        Ask(0, 60, logprobs=True, after=3),
        Ask(5, 30, logprobs=False, after=20 + late),
        Ask(1, 20, logprobs=False, after=170),
    ]
    plain, _ = results(graph, asked, 2)
    looped, run = results(looping, asked, 2)
    assert looped == plain
    assert any(plan.behind and plan.prefills for plan in run.plans)


def test_a_request_joins(looping: Assembly) -> None:
    """The loop that would have the first answer to its end ends for it."""
    length = 250
    first, late = sequences = [question(looping, 0, length), question(looping, 1, 5)]
    task, late_task = recorded(sequences)
    run = Decodes(looping, at_once=1)
    run.scheduler.submit(first)
    while len(task.tokens) < 30:
        run.scheduler.step()
    run.scheduler.submit(late)
    while not late_task.tokens:
        run.scheduler.step()
    assert len(task.tokens) < length
    run.scheduler.drain()
    assert len(task.tokens) == length
