"""Loops on a CPU: the same answers, in few launches, and the control step as specified."""

from __future__ import annotations

import time

import msgspec
import pytest
import torch
from legato_engine.config import EngineConfig, check
from legato_engine.engine.assembly import Assembly, assemble, with_decode_path
from legato_engine.errors import InvalidField, LegatoError
from legato_engine.kernels.decode_loop import DONE, STOP, LoopTensors, control_step
from legato_engine.sequence import Sequence

from benchmarks.loops import Decodes, question, randomly, recorded

SCRATCH = 9

Answers = tuple[list[list[int]], int]


@pytest.fixture(scope="module")
def graph():
    made = assemble(
        EngineConfig(
            device="cpu", threads=1, model="random-tiny", random_weights=True, max_running=6
        )
    )
    yield made
    made.device.close()


@pytest.fixture(scope="module")
def looping(graph: Assembly) -> Assembly:
    return with_decode_path(graph, "loop")


class Tolerant(Decodes):
    """Keeps the failures."""

    def __init__(self, assembly: Assembly, *, at_once: int) -> None:
        self.failures: list[LegatoError] = []
        super().__init__(assembly, at_once=at_once)

    def failed(self, sequence: Sequence, error: LegatoError) -> None:
        self.failures.append(error)


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

    monkeypatch.setattr("legato_engine.runtime.decode_loop.control_step", control)
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
        limit=torch.tensor([limit]),
        step=torch.zeros(1, dtype=torch.int64),
        ring_SB=torch.zeros(4, 3, dtype=torch.int64),
        words=torch.zeros(2, dtype=torch.int64),
        scratch_row=SCRATCH,
    )


def test_a_control_step_publishes_and_advances() -> None:
    """Padding stays, and its token is not looked at."""
    loop = loop_of(limit=3)
    assert [control_step(loop) for _ in range(3)] == [True, True, False]
    assert loop.position_B.tolist() == loop.fresh_B.tolist() == [6, 8, 0]
    assert loop.sample_position_B.tolist() == [6, 8, 0]
    assert loop.ring_SB[:3, :2].tolist() == [[7, 8]] * 3
    assert int(loop.words[DONE]) == 3


def test_the_host_ends_a_loop() -> None:
    loop = loop_of(limit=3)
    loop.words[STOP] = 1
    assert not control_step(loop)


@pytest.mark.parametrize(
    "config", [EngineConfig(speculation="fixed:4"), EngineConfig(cuda_graphs=False)]
)
def test_what_excludes_loops(config: EngineConfig) -> None:
    check(config)
    with pytest.raises(InvalidField, match="decode_path"):
        check(msgspec.structs.replace(config, decode_path="loop"))


def test_the_wait_for_a_first_step_is_no_length_of_a_step(looping: Assembly) -> None:
    """It may hold a prefill in front; the host would sleep through the steps after it."""
    loops = looping.runner._loops
    assert loops is not None
    loops.start(0, 1, looping.runner._resources.buckets[0], 0, 2, sampled=False)
    looping.device.compute.record().wait()
    now = time.perf_counter() + 1.0
    loops._measure(now)
    assert loops._step_seconds == 0.0
    loops._measure(now + 0.002)
    assert loops._step_seconds == pytest.approx(0.002)
