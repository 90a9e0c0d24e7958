"""The host's side of the resident kernel, with a fake one on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
import structlog
import torch
from legato_engine.config import EngineConfig
from legato_engine.engine.assembly import Assembly
from legato_engine.engine.loading import assemble, speculating, with_decode_path
from legato_engine.kernels.cuda.decoder_sizes import DecoderSizes
from legato_engine.kernels.cuda.resident_limits import Wish, obstacle
from legato_engine.kernels.cuda.value_heads import TwoLayerValues, ValueSizes
from legato_engine.kernels.resident import ResidentRows, values_obstacle
from legato_engine.runtime.backend import Needs
from legato_engine.runtime.model_runner import ModelRunner
from legato_engine.runtime.passes import bucket_for
from legato_engine.speculative.lookup import LookupProposer
from legato_engine.speculative.proposer import Proposer, RowHistory

from benchmarks.loops import Decodes, question, randomly, recorded
from tests.loop_answers import Ask, results


@pytest.fixture(scope="module")
def graph():
    made = assemble(
        EngineConfig(
            device="cpu", threads=1, model="random-tiny", random_weights=True, max_running=6
        )
    )
    yield made
    made.device.close()


class Fake:
    """Steps of torch's operations instead; gives up a wait after `steps` of them, if any."""

    max_rows = 4
    drafts = False

    def __init__(
        self, runner: ModelRunner, steps: int | None = None, *, has_values: bool = True
    ) -> None:
        self.has_values = has_values
        assert runner._loops is not None
        self._loops, self._slots = runner._loops, runner._slots
        self._buckets = runner._resources.buckets
        self._left = steps
        self.launches = 0
        self.kinds: set[bool] = set()
        self.stuck = False

    def run(
        self,
        rows: ResidentRows,
        num_rows: int,
        num_steps: int,
        *,
        payload: bool = False,
        num_tokens: int = 0,
    ) -> None:
        del num_tokens
        assert self.has_values or not payload
        assert 0 < num_rows <= self.max_rows
        assert not self.stuck, "no launch may follow one that was stuck"
        self.launches += 1
        self.kinds.add(payload)
        if self._left is not None:
            self.stuck = num_steps > self._left
            num_steps = min(num_steps, self._left)
            self._left -= num_steps
        if num_steps:
            row = rows.row_B.data_ptr()
            slots = [slot.staged.device["row"].data_ptr() for slot in self._slots]
            self._loops._limit.fill_(num_steps)
            self._loops._step.zero_()
            bucket = bucket_for(self._buckets, num_rows)
            needs = Needs(True, payload, False)
            self._loops._loop(slots.index(row), bucket, 0, needs)()

    def fault(self) -> str | None:
        return "worker 3, counter 5" if self.stuck else None


def with_fake(
    graph: Assembly, steps: int | None = None, *, has_values: bool = True
) -> tuple[Assembly, Fake]:
    made = with_decode_path(graph, "resident")
    fake = Fake(made.runner, steps, has_values=has_values)
    assert made.runner._loops is not None
    made.runner._loops._resident = fake
    return made, fake


def answers(assembly: Assembly, lengths: list[int]) -> list[list[int]]:
    sequences = [question(assembly, index, length) for index, length in enumerate(lengths)]
    tasks = recorded(sequences)
    run = Decodes(assembly, at_once=len(lengths))
    for sequence in sequences:
        run.scheduler.submit(sequence)
    run.scheduler.drain()
    return [task.tokens for task in tasks]


def test_every_step_of_rows_that_it_takes_is_its_own(
    graph: Assembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single steps too, as bits would differ otherwise."""
    expected = answers(graph, [40, 7, 2, 23])
    assembly, fake = with_fake(graph)

    def decode(*_: object) -> None:
        raise AssertionError("a step of another path")

    monkeypatch.setattr(assembly.runner._backend, "decode", decode)
    assert answers(assembly, [40, 7, 2, 23]) == expected
    assert fake.launches > 0
    totals = randomly(assembly, num_steps=60, seed=5, skills=False)
    assert totals["different"] == 0


@pytest.mark.parametrize("has_values", [True, False])
def test_values_are_its_own_where_it_has_them(graph: Assembly, has_values: bool) -> None:
    """Answers of every skill, with and without log-probabilities, are what they are alone; without
    values it gets words alone.
    """
    assembly, fake = with_fake(graph, has_values=has_values)
    totals = randomly(assembly, num_steps=100, seed=5)
    assert totals["different"] == 0
    assert fake.kinds == ({False, True} if has_values else {False})


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("kind", [0, 4])
def test_log_probabilities_are_of_loops(graph: Assembly, kind: int, logprobs: bool) -> None:
    """A list or a caption that wants them has no launch of the kernel, and is what it is alone."""
    asked = [Ask(kind, 12, logprobs=logprobs, after=0)]
    assembly, fake = with_fake(graph)
    assert results(assembly, asked, depth=2)[0] == results(graph, asked, depth=2)[0]
    assert (fake.launches == 0) == logprobs


def test_more_rows_than_it_takes_run_in_loops(graph: Assembly) -> None:
    assembly, fake = with_fake(graph)
    lengths = [20] * (fake.max_rows + 1)
    assert answers(assembly, lengths) == answers(graph, lengths)
    assert fake.launches == 0


@pytest.mark.parametrize("steps", [0, 1, 9])
def test_a_stuck_launch_loses_no_request(graph: Assembly, steps: int) -> None:
    """The rows go on in loops after the last step that there was, and the log says once which wait
    it was.
    """
    expected = answers(graph, [30, 12, 30])
    assembly, fake = with_fake(graph, steps)
    with structlog.testing.capture_logs() as lines:
        assert answers(assembly, [30, 12, 30]) == expected
    assert fake.stuck
    assert assembly.runner.resident_rows == 0
    stuck = [line for line in lines if line["event"] == "resident_kernel_stuck"]
    assert [line["wait"] for line in stuck] == ["worker 3, counter 5"]


class Silent:
    """Another proposer than lookups."""

    sequential = False

    def propose(self, history: RowHistory, draft_RK: torch.Tensor) -> None:
        del history, draft_RK


@pytest.mark.parametrize(
    ("proposer", "reason"),
    [
        (None, "it needs kernels for the model"),
        (LookupProposer(), "it needs kernels for the model"),
        (Silent(), "it takes draft tokens of lookups alone"),
    ],
    ids=("off", "lookup", "another"),
)
def test_where_it_cannot_run_loops_stand_in(
    graph: Assembly, proposer: Proposer | None, reason: str
) -> None:
    """The log says why when the engine starts, with speculation too."""
    config = msgspec.structs.replace(graph.config, decode_path="resident")
    setting = "off" if proposer is None else "fixed:2"
    with structlog.testing.capture_logs() as lines:
        assembly = speculating(dataclasses.replace(graph, config=config), setting, proposer)
    assert assembly.runner.resident_rows == 0
    assert assembly.runner.decodes_by_loops
    said = [line["reason"] for line in lines if line["event"] == "no_resident_kernel"]
    assert said == [reason]


SIZES = DecoderSizes(
    dim=2048,
    ff_dim=8192,
    num_heads=32,
    rotary_dim=32,
    vocab_size=51200,
    page_size=16,
    max_pages=128,
)
WISH = Wish(SIZES, 24, True, torch.bfloat16, (9, 0), 132, 10_000_000_000)


def test_moondream_2_on_a_hopper_gpu_is_within_all_limits() -> None:
    assert obstacle(WISH) is None


VALUES = ValueSizes(
    dim=2048,
    inner_dim=8192,
    scalar_features=128,
    pair_features=256,
    scalar_bins=1024,
    pair_bins=2048,
    scalar_divisor=1024,
    scalar_token=5,
    pair_token=6,
    end_token=0,
    scalar_reach=32,
    pair_reach=51,
    vocab=51200,
)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, None),
        ({"inner_dim": 960}, "16 outputs of each layer"),
        ({"scalar_bins": 448}, "multiples of 128"),
        ({"pair_features": 516}, "512 frequencies"),
    ],
    ids=str,
)
def test_values_that_it_does_not_take_are_named(change: dict[str, int], text: str | None) -> None:
    """Moondream 2's are within the limits."""
    none: Any = None  # no weights
    sizes = dataclasses.replace(VALUES, **change)
    obstacle = values_obstacle(SIZES, TwoLayerValues(sizes, none, none))
    assert obstacle == text or str(text) in str(obstacle)
    assert "two layers" in str(values_obstacle(SIZES, None))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"capability": (10, 0)}, "compute capability"),
        ({"capability": None}, "compute capability"),
        ({"dtype": torch.float32}, "computes in bf16"),
        ({"plain": False}, "without gains"),
        ({"processors": 100}, "multiprocessor"),
        ({"free_bytes": 1_000_000_000}, "memory"),
        ({"kv_bytes": 1}, "keys and values"),
        ({"num_heads": 16}, "heads of 64"),
        ({"ff_dim": 10240}, "2 to 4 times"),
        ({"vocab_size": 51208}, "vocabulary"),
        ({"max_pages": 129}, "pages"),
        ({"num_layers": 40}, "as many layers"),
        ({"page_size": 32}, "pages"),
    ],
    ids=str,
)
def test_a_limit_that_is_exceeded_is_named(change: dict[str, Any], text: str) -> None:
    own = {field.name for field in dataclasses.fields(Wish)}
    if set(change) <= own:
        wish = dataclasses.replace(WISH, **change)
    else:
        wish = dataclasses.replace(WISH, sizes=dataclasses.replace(SIZES, **change))
    assert text in str(obstacle(wish))
