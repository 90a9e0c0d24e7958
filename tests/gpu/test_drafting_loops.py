"""Loops of drafting steps on a GPU: one launch, with the tokens and bits of single steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.kernels.accelerated import captured_loop
from legato_engine.kernels.decode_loop import (
    DONE,
    STOP,
    AnyLoop,
    DraftLoopTensors,
    control_drafting_step,
)
from legato_engine.runtime.sampler import successor_table
from legato_engine.sequence import Constraint
from legato_engine.speculation import CostTable, TokenBudgetPolicy

from benchmarks.decode.loops import question, randomly
from benchmarks.speculation.decode_paths import answer, both_paths, oracle, teach
from tests.engine.models import hub_folder
from tests.gpu.guard import close
from tests.loop_answers import Ask, results

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MOST = 8
COSTS = TokenBudgetPolicy(CostTable(((1, 1.0), (9, 1.2), (36, 1.9)), 0.1, 0.02))
TABLE = (Constraint(), Constraint(then=2), Constraint(then=1, on=8), Constraint(then=0, on=3))


@pytest.fixture(scope="module")
def plain() -> Iterator[Assembly]:
    made = assemble(
        EngineConfig(device="cuda", decode_path="graph", max_running=MOST, crops_per_launch=0)
    )
    yield made
    close(made)


@pytest.mark.parametrize("setting", ["fixed:4", "seed", "budget"])
def test_answers_and_blocks_are_those_of_single_steps(plain: Assembly, setting: str) -> None:
    """At any acceptance; a lone answer of 256 tokens is one launch."""
    known_by, proposer = oracle(plain, MOST)
    paths = both_paths(plain, setting, proposer, COSTS)
    for lengths in ([256], [256] * MOST, [90, 7, 40, 23, 256]):
        for rate in (0.0, 0.7, 0.95):
            asked = [question(plain, index, length) for index, length in enumerate(lengths)]
            wanted = answer(plain, asked, lengths)
            teach(known_by, asked, wanted, rate)
            single, looped = (
                answer(path, [question(path, i, n) for i, n in enumerate(lengths)], lengths)
                for path in paths
            )
            assert single.tokens == looped.tokens == wanted.tokens
            assert single.blocks == looped.blocks
            if lengths == [256]:
                assert looped.run.launches == 1
                assert looped.run.waits == 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("setting", ["seed", "budget"])
def test_every_skill_comes_to_the_same_bits(plain: Assembly, setting: str, depth: int) -> None:
    """By the model's own draft: tokens, values, log-probabilities, events, ends and results."""
    paths = both_paths(plain, setting, costs=COSTS)
    kinds = [Ask(kind % 7, 40 + kind, logprobs=kind % 2 > 0, after=kind) for kind in range(10)]
    single, _ = results(paths.graph, kinds, depth)
    looped, run = results(paths.loop, kinds, depth)
    assert looped == single
    assert run.launches < run.steps


def test_requests_come_and_go(plain: Assembly) -> None:
    """Arrivals and aborts at any step change no answer."""
    totals = randomly(both_paths(plain, "seed").loop, num_steps=4000, seed=5)
    assert totals["different"] == 0
    assert totals["launches"] < 0.95 * totals["steps"]


def test_a_model_by_torch_loops_with_another_as_its_draft(tmp_path: Path) -> None:
    """Its captured steps allocate memory, and the draft has a proposal for each block."""
    hub_folder.write(tmp_path, hub_folder.phi())
    for draft in ("lookup", f"phi:{tmp_path}"):
        config = EngineConfig(
            model="phi",
            weights=str(tmp_path),
            device="cuda",
            dtype="f32",
            decode_path="graph",
            draft=draft,
            max_running=1,
            num_pages=400,
        )
        made = assemble(config)
        single, looped = (
            answer(path, [question(path, 0, 60)], [60]) for path in both_paths(made, "fixed:4")
        )
        assert looped.tokens == single.tokens
        assert looped.blocks == single.blocks
        assert looped.run.launches == 1
        close(made)


def loop_of(draw: torch.Generator, device: str) -> DraftLoopTensors:
    """Rows at random positions, some of padding or without tokens."""
    rows, states, tokens = 40, 60, 160

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=draw)

    row_B = torch.randperm(states, generator=draw)[:rows]
    row_B[numbers(0, rows, 6)] = states
    count_B = numbers(0, 4, rows)
    count_B[row_B == states] = 0
    token_B = numbers(0, 12, tokens)
    if int(numbers(0, 4, 1)) == 0:
        token_B[numbers(0, tokens, 1)] = -1
    slack = int(numbers(0, 40, 1))
    fields = {
        "row_B": row_B,
        "room_B": numbers(-1, 9, rows),
        "reach_B": numbers(100 + slack, 140 + slack, rows),
        "start_B": count_B.cumsum(0) - count_B,
        "count_B": count_B,
        "position_R": numbers(60, 100, states),
        "limit_R": numbers(98 + slack // 2, 200, states),
        "token_B": token_B,
        "constraint_B": numbers(0, len(TABLE), rows),
        "successor_C2": successor_table(TABLE),
        "outputs_N": numbers(0, 256, 4096).to(torch.uint8),
        "limit": numbers(1, 6, 1),
        "step": torch.zeros(1, dtype=torch.int64),
    }
    on_device = {name: field.to(device) for name, field in fields.items()}
    pin = device != "cpu"
    return DraftLoopTensors(
        **on_device,
        ring_SN=torch.zeros(8, 4096, dtype=torch.uint8, pin_memory=pin),
        words=torch.zeros(2, dtype=torch.int64, pin_memory=pin),
        scratch_row=states,
    )


def test_the_control_kernel_is_as_specified(plain: Assembly) -> None:
    """Steps, ring and constraints of loops over nothing, until they end."""
    del plain  # its device has made a stream the current one
    steps = set()
    for seed in range(300):
        told, by_kernel = (
            loop_of(torch.Generator().manual_seed(seed), device) for device in ("cpu", "cuda")
        )
        for each in (told, by_kernel):
            each.words[STOP] = seed % 7 == 0
        while control_drafting_step(told):
            pass
        loop = captured_loop((), by_kernel)
        assert loop is not None
        loop()
        torch.cuda.synchronize()
        assert same(told, by_kernel)
        steps.add(int(told.words[DONE]))
    assert steps == {1, 2, 3, 4, 5}


def same(one: AnyLoop, other: AnyLoop) -> bool:
    return all(
        getattr(one, name).tolist() == getattr(other, name).tolist()
        for name in ("constraint_B", "step", "ring_SN", "words")
    )
