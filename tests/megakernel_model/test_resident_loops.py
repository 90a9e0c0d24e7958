"""The host's side of the megakernel, with a fake one on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pytest
import structlog
import torch
from legato_engine.config import LOOKUP_DRAFT, EngineConfig
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.kernels.cuda.capability import HOPPER, Gpu
from legato_engine.kernels.cuda.decoder import DecoderSizes
from legato_engine.kernels.cuda.value_heads import TwoLayerValues, ValueSizes
from legato_engine.kernels.decode_loop import BatchKind, MegakernelRows
from legato_engine.kernels.megakernel.kernel import values_obstacle
from legato_engine.kernels.megakernel.offer import KernelTarget, unsupported_reason
from legato_engine.kernels.proposer import LookupProposer, Proposer, RowHistory
from legato_engine.runtime.autotune import ALL
from legato_engine.runtime.backend import Needs
from legato_engine.runtime.buffers import TokenRing
from legato_engine.runtime.decode_slot import DecodeSlot, Resources
from legato_engine.runtime.drafting import DraftSnapshot
from legato_engine.runtime.model_runner import ModelRunner
from legato_engine.runtime.sampler import GREEDY_TEMPERATURE
from legato_engine.runtime.staging import Changes, bucket_for
from legato_engine.scheduler.batch import Plan, StepRecord
from legato_engine.scheduler.output import OutputProcessor

from benchmarks.decode.loops import Decodes, question, randomly, recorded
from benchmarks.speculation.run import with_settings
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


_MAX_TOKENS = 16


class Fake:
    """Fake megakernel that runs torch's steps; a wait times out after `steps` of them, if given.

    Like the kernel it updates the position among the staged fields only, to the last step that
    the ring counts. With drafts it verifies one step more before the timeout.
    """

    most = 4
    drafts = False

    def __init__(self, kinds: Iterable[BatchKind], steps: int | None = None) -> None:
        self.max_rows = {kind: kind.counts_as(self.most, _MAX_TOKENS) for kind in kinds}
        self.left = steps
        self.launches = 0
        self.kinds: set[tuple[bool, int, bool]] = set()  # with values, rows, whether any is drawn
        self.stuck = False

    def bind(self, runner: ModelRunner) -> None:
        self.drafts = runner._drafts is not None
        assert runner._loops is not None
        self._loops, self._slots = runner._loops, runner._slots
        self._backend = runner._backend
        self._buckets = runner._resources.buckets

    def run(
        self,
        rows: MegakernelRows,
        num_rows: int,
        num_steps: int,
        *,
        payload: bool = False,
        num_tokens: int = 0,
    ) -> None:
        kind = BatchKind.of(values=payload, drafts=self.drafts)
        assert 0 < kind.counts_as(num_rows, num_tokens) <= self.max_rows[kind]
        assert not self.stuck, "no launch may follow one that was stuck"
        self.launches += 1
        if self.left is not None:
            self.stuck = num_steps > self.left
            num_steps = min(num_steps, self.left)
            self.left -= num_steps
        row = rows.row_B.data_ptr()
        slot = [each.staged.device["row"].data_ptr() for each in self._slots].index(row)
        needs = Needs(sampled=True, payload=payload, logprobs=False)
        bucket = bucket_for(self._buckets, max(num_rows, num_tokens))
        staged = self._slots[slot].staged.device
        own_B = staged["scheduled_row" if self.drafts else "row"][:num_rows]
        drawn = bool((rows.state.temperature_R[own_B] > GREEDY_TEMPERATURE).any())
        self.kinds.add((payload, num_rows, drawn))
        kept = {name: staged[name].clone() for name in ("fresh", "sample_position")}
        if num_steps:
            self._loops._limit.fill_(num_steps)
            self._loops._step.zero_()
            self._loops._loop(slot, bucket, 0, needs)()
        if self.stuck and self.drafts:
            for work in self._backend.loop_works(slot, bucket, 0, needs):
                work()
        if not self.drafts:
            for name, field in kept.items():
                staged[name].copy_(field)

    def fault(self) -> str | None:
        return "worker 3, counter 5" if self.stuck else None


class Launches:
    """Launches of rows that draft: the host's side of `DraftLaunches`, without kernels."""

    def __init__(self, resources: Resources, rings: Sequence[TokenRing]) -> None:
        assert resources.state.drafts is not None
        self._resources, self._rings = resources, rings
        self._before = DraftSnapshot(resources.state.drafts, resources.state)

    def begin(self, slot: int) -> None:
        del slot
        self._resources.compute.submit(self._before.take)

    def restore(self, slot: int) -> None:
        rows = self._resources.slots[slot].staged.device["scheduled_row"].tolist()
        self._before.restore(rows, self._rings[slot])


def faking(made: Assembly, steps: int | None = None, *, has_values: bool = True) -> Fake:
    """Let launches of an assembly be the fake's."""
    loops, drafts = made.runner._loops, made.runner._drafts is not None
    assert loops is not None
    kinds = [BatchKind.of(values=each, drafts=drafts) for each in (False, True)[: 1 + has_values]]
    fake = Fake(kinds, steps)
    fake.bind(made.runner)
    loops.choice = ALL
    loops._megakernel = fake
    if fake.drafts:
        launches = Launches(made.runner._resources, loops._rings)
        loops._drafting = launches  # type: ignore[assignment]  # its two methods
    return fake


def with_fake(
    graph: Assembly, steps: int | None = None, *, has_values: bool = True
) -> tuple[Assembly, Fake]:
    made = with_settings(graph, decode_path="resident")
    return made, faking(made, steps, has_values=has_values)


def drafting(graph: Assembly, setting: str) -> Assembly:
    """Return the assembly with loops of rows that draft by lookups."""
    config = msgspec.structs.replace(graph.config, decode_path="loop", draft=LOOKUP_DRAFT)
    return with_settings(dataclasses.replace(graph, config=config), speculation=setting)


class Behind:
    """Counts launches whose rows the device places behind a loop."""

    def __init__(self, assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        staging = assembly.runner._staging
        changes_of = staging.changes

        def counted(slot: DecodeSlot, plan: Plan) -> Changes:
            changes = changes_of(slot, plan)
            self.count += changes.places
            return changes

        monkeypatch.setattr(staging, "changes", counted)


def answers(assembly: Assembly, lengths: list[int]) -> list[list[int]]:
    sequences = [question(assembly, index, length) for index, length in enumerate(lengths)]
    tasks = recorded(sequences)
    run = Decodes(assembly, at_once=len(lengths))
    for sequence in sequences:
        run.scheduler.submit(sequence)
    run.scheduler.drain()
    return [task.tokens for task in tasks]


@pytest.mark.parametrize("skills", [False, True])
def test_its_launches_are_loops_among_other_launches(
    graph: Assembly, monkeypatch: pytest.MonkeyPatch, skills: bool
) -> None:
    """Prompts join their rows, and decodes follow them, before they have ended."""
    expected = answers(graph, [40, 7, 2, 23])
    assembly, fake = with_fake(graph)
    behind = Behind(assembly, monkeypatch)
    assert answers(assembly, [40, 7, 2, 23]) == expected
    assert fake.launches > 0
    assert behind.count > 0
    totals = randomly(assembly, num_steps=60, seed=5, skills=skills)
    assert totals["different"] == 0


@pytest.mark.parametrize("setting", ["fixed:3", "seed"])
@pytest.mark.parametrize("has_values", [True, False])
def test_lists_beside_answers_that_draft_are_its_own_where_it_has_values(
    graph: Assembly, monkeypatch: pytest.MonkeyPatch, setting: str, has_values: bool
) -> None:
    """A row with values has no draft tokens, and one that drafts no values."""
    asked = [Ask(kind, 40, logprobs=False, after=after) for kind, after in ((9, 0), (0, 2), (1, 9))]
    expected, _ = results(graph, asked, depth=2)
    assembly = drafting(graph, setting)
    fake = faking(assembly, has_values=has_values)
    assert results(assembly, asked, depth=2)[0] == expected
    assert {payload for payload, _, _ in fake.kinds} == {False, has_values}


@pytest.mark.parametrize("has_values", [True, False])
def test_values_are_its_own_where_it_has_them(graph: Assembly, has_values: bool) -> None:
    """Answers of every skill, with and without log-probabilities, are what they are alone.

    Without values the kernel gets words alone, and log-probabilities it never gets.
    """
    assembly, fake = with_fake(graph, has_values=has_values)
    totals = randomly(assembly, num_steps=100, seed=5)
    assert totals["different"] == 0
    assert any(with_values for with_values, _, _ in fake.kinds) == has_values


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
    lengths = [20] * (fake.most + 1)
    assert answers(assembly, lengths) == answers(graph, lengths)
    assert fake.launches == 0


def test_its_loops_are_worth_their_start_after_fewer_steps(graph: Assembly) -> None:
    """Than captured ones, whose steps are no faster than single steps."""
    assembly, fake = with_fake(graph)
    loops, bucket = assembly.runner._loops, assembly.runner._resources.buckets[-1]
    assert loops is not None

    def worthwhile(num_rows: int) -> int:
        loops.start(0, num_rows, num_rows, bucket, 0, 0, Needs(False, False, False), common=False)
        return loops.break_even_steps(0)

    assert worthwhile(fake.most) < worthwhile(fake.most + 1)


@pytest.mark.parametrize("steps", [0, 1, *range(8, 14)])
def test_a_stuck_launch_loses_no_request(graph: Assembly, steps: int) -> None:
    """Rows of a stuck launch continue in loops, and the log says once which wait it was.

    They start after the last step that there was. The answer of 12 tokens ends while others are
    behind its loop.
    """
    expected = answers(graph, [30, 12, 30])
    assembly, fake = with_fake(graph, steps)
    with structlog.testing.capture_logs() as lines:
        assert answers(assembly, [30, 12, 30]) == expected
    assert fake.stuck
    assert assembly.runner.megakernel_rows == 0
    stuck = [line for line in lines if line["event"] == "megakernel_timeout"]
    assert [line["wait"] for line in stuck] == ["worker 3, counter 5"]


@pytest.mark.parametrize("setting", ["fixed:3", "seed"])
def test_a_stuck_launch_with_drafts_loses_no_request(
    graph: Assembly, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """Steps that the host has not read are rolled back, and so is a decode behind the loop."""
    rolled_back = list[StepRecord]()
    roll_back = OutputProcessor.roll_back

    def noted(self: OutputProcessor, record: StepRecord, *, before_loop: bool) -> None:
        rolled_back.append(record)
        roll_back(self, record, before_loop=before_loop)

    monkeypatch.setattr(OutputProcessor, "roll_back", noted)
    expected = answers(graph, [30, 12, 30])
    asked = [Ask(kind, 40, logprobs=False, after=0) for kind in (9, 0, 1)]
    lists, _ = results(graph, asked, depth=2)
    assembly = drafting(graph, setting)
    for steps in (0, 1, 5, 11, 12, 13):
        fake = faking(assembly, steps)
        assert answers(assembly, [30, 12, 30]) == expected
        assert fake.stuck
        fake = faking(assembly, steps)
        assert results(assembly, asked, depth=2)[0] == lists
        assert fake.stuck
    assert rolled_back


class Silent:
    """A proposer that is not a lookup."""

    sequential = False

    def propose(self, history: RowHistory, draft_RK: torch.Tensor) -> None:
        del history, draft_RK


@pytest.mark.parametrize(
    ("proposer", "reason"),
    [
        (None, "it needs kernels for the model"),
        (LookupProposer(), "it needs kernels for the model"),
        (Silent(), "it runs drafts by lookup only"),
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
        assembly = with_settings(
            dataclasses.replace(graph, config=config), proposer, speculation=setting
        )
    assert assembly.runner.megakernel_rows == 0
    assert assembly.runner.decodes_by_loops
    said = [line["reason"] for line in lines if line["event"] == "megakernel_unavailable"]
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
TARGET = KernelTarget(SIZES, 24, True, torch.bfloat16, HOPPER, 132, 10_000_000_000)


def test_moondream_2_on_a_hopper_gpu_is_within_all_limits() -> None:
    assert unsupported_reason(TARGET) is None


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
        ({"inner_dim": 960}, "layers have at least 2048 outputs"),
        ({"scalar_bins": 448}, "not 448 and 2048"),
        ({"pair_features": 516}, "512 Fourier frequencies"),
    ],
    ids=str,
)
def test_values_that_it_does_not_take_are_named(change: dict[str, int], text: str | None) -> None:
    """Moondream 2's are within the limits."""
    none: Any = None  # no weights
    sizes = dataclasses.replace(VALUES, **change)
    unsupported_reason = values_obstacle(SIZES, TwoLayerValues(sizes, none, none))
    assert unsupported_reason == text or str(text) in str(unsupported_reason)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"gpu": Gpu((10, 0))}, "compute capability"),
        ({"gpu": None}, "compute capability"),
        ({"dtype": torch.float32}, "weights in bf16"),
        ({"plain": False}, "without gains"),
        ({"processors": 100}, "multiprocessor"),
        ({"free_bytes": 1_000_000_000}, "memory"),
        ({"kv_bytes": 1}, "KV cache in bf16"),
        ({"num_heads": 16}, "heads of 64"),
        ({"ff_dim": 10240}, "2 to 4 times"),
        ({"vocab_size": 51208}, "vocabulary"),
        ({"max_pages": 129}, "pages"),
        ({"num_layers": 44}, "instructions of so many layers"),
        ({"page_size": 32}, "pages"),
    ],
    ids=str,
)
def test_a_limit_that_is_exceeded_is_named(change: dict[str, Any], text: str) -> None:
    own = {field.name for field in dataclasses.fields(KernelTarget)}
    if set(change) <= own:
        target = dataclasses.replace(TARGET, **change)
    else:
        target = dataclasses.replace(TARGET, sizes=dataclasses.replace(SIZES, **change))
    assert text in str(unsupported_reason(target))
