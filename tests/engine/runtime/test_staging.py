"""Launches cut into passes, their staging, and the times of steps."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble
from legato_engine.device.cpu import CpuDevice
from legato_engine.kernels.proposer import UNKNOWN
from legato_engine.runtime import calibration
from legato_engine.runtime.buffers import Fields, StagingBuffer, StagingRoom, size_of
from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.staging import (
    PROMPT,
    Pass,
    ScheduledPrompt,
    cut_passes,
    stage_pass,
    stage_step,
)
from legato_engine.scheduler.batch import ScheduledSequence

from benchmarks.speculation.run import with_settings

# ---------------------------------------------------------------- passes
# The cut of a launch into passes, and their staging.

NO_VALUE = (0.0, 0.0)


def decode(row, position):
    """A row that feeds its newest token."""
    sequence: Any = SimpleNamespace(row=row)
    return ScheduledSequence(sequence, position)


def prompt(row, start, count):
    """A prompt whose token ids encode row and position."""
    return ScheduledPrompt(row, start, [(1000 * row + start + n, NO_VALUE) for n in range(count)])


@pytest.mark.parametrize("seed", range(40))
def test_every_token_is_scheduled_once_after_earlier_ones(seed):
    """Passes are as few as possible, and the sampled tokens come first in the last one."""
    draw = random.Random(seed)
    most = draw.choice((4, 8, 32))
    num_prompts = draw.randint(1, min(4, most))
    decodes = [decode(n, draw.randint(1, 99)) for n in range(draw.randint(0, most - num_prompts))]
    prompts = [
        prompt(100 + n, draw.randint(0, 50), draw.randint(1, most)) for n in range(num_prompts)
    ]
    passes = cut_passes(decodes, prompts, most)
    total = len(decodes) + sum(len(each.tokens) for each in prompts)
    assert len(passes) == -(-total // most)
    assert all(0 < each.num_tokens <= most for each in passes)
    assert sum(each.num_tokens for each in passes) == total
    assert [len(each.decodes) for each in passes] == [0] * (len(passes) - 1) + [len(decodes)]
    assert list(passes[-1].decodes) == decodes
    lasts = [each.part(len(each.tokens) - 1, len(each.tokens)) for each in prompts]
    assert list(passes[-1].prompts[:num_prompts]) == lasts
    for each in prompts:
        fed = sorted(
            (run.start + n, number, token)
            for number, given in enumerate(passes)
            for run in given.prompts
            if run.row == each.row
            for n, token in enumerate(run.tokens)
        )
        assert [position for position, _, _ in fed] == [
            each.start + n for n in range(len(each.tokens))
        ]
        assert [token for _, _, token in fed] == each.tokens
        numbers = [number for _, number, _ in fed]
        assert numbers == sorted(numbers), "a later token runs in an earlier pass"


@pytest.mark.parametrize(
    ("decodes", "rows", "groups"),
    [
        *((0, "a", 1), (0, "aaaaaaaa", 1), (0, "aaaaaaaaa", 2), (0, "abc", 3)),
        *((0, "abbbbbbbbbba", 4), (0, "aba", 3), (3, "", 3), (2, "abb", 4)),
    ],
)
def test_neighbours_of_one_row_are_groups(decodes, rows, groups):
    """A group is a run of up to eight tokens; a row with two runs has two groups."""
    given = Pass([decode(n, 5) for n in range(decodes)], [prompt(ord(row), 0, 1) for row in rows])
    assert given.num_groups(8) == groups


@pytest.fixture
def slot():
    """A slot of eight tokens."""
    device = CpuDevice(1)
    made = DecodeSlot(
        device, max_rows=8, max_pages=2, max_prompt=8, width=1, vocab_size=9, dtype=torch.float32
    )
    for host in made.staged.hosts:
        for field in host.values():
            field.fill(77)
    yield made
    device.close()


def staged(slot, copy, count):
    """The first entries of the staged positions."""
    fields = ("row", "source", "position", "fresh")
    return [slot.staged.hosts[copy][field][:count].tolist() for field in fields]


def test_a_pass_is_staged_with_what_it_writes_first(slot):
    """`fresh` is a row's first position in this pass; entries after its tokens are padding."""
    passes = cut_passes([decode(1, 20)], [prompt(2, 5, 3), prompt(3, 0, 3)], 4)
    assert len(passes) == 2
    stage_pass(slot, 0, passes[0], 4, 6)
    assert staged(slot, 0, 4) == [[2, 2, 3, 6], [-1, -1, -1, 6], [5, 6, 0, 0], [5, 5, 0, 1]]
    stage_pass(slot, 1, passes[1], 8, 6)
    assert staged(slot, 1, 8) == [
        [1, 2, 3, 3, 6, 6, 6, 6],
        [1, -1, -1, -1, 6, 6, 6, 6],
        [20, 7, 2, 1, 0, 0, 0, 0],
        [20, 7, 1, 1, 1, 1, 1, 1],
    ]
    assert slot.staged.hosts[1]["token"][1:4].tolist() == [2007, 3002, 3001]
    assert np.all(slot.staged.hosts[1]["payload"][1:4] == 0)


def test_values_of_tokens_are_staged(slot):
    """Those of a resumed answer."""
    tokens = [(5, NO_VALUE), (6, (0.25, 0.5))]
    stage_pass(slot, 0, Pass((), [ScheduledPrompt(2, 3, tokens)]), 4, 6)
    assert slot.staged.hosts[0]["token"][:2].tolist() == [5, 6]
    assert slot.staged.hosts[0]["payload"][:2].tolist() == [[0, 0], [0.25, 0.5]]


def test_a_step_is_staged_up_to_its_bucket(slot):
    """Every row feeds its own newest token."""
    stage_step(slot, [decode(1, 20), decode(4, 9)], 4, 6)
    expected = [[1, 4, 6, 6], [1, 4, 6, 6], [20, 9, 0, 0], [20, 9, 1, 1]]
    assert staged(slot, 0, 4) == expected
    assert staged(slot, 0, 8)[0][4:] == [77] * 4


def test_forced_tokens_follow_the_newest(slot):
    """A row is sampled from its last token at its own index; its others come after all rows."""
    rows = [decode(1, 20), decode(4, 9).with_forced((31, 32, 33)), decode(2, 5).with_forced((7,))]
    slot.staged.host["payload"].fill(3.0)
    stage_step(slot, rows, 8, 6)
    assert staged(slot, 0, 8) == [
        [1, 4, 2, 4, 4, 4, 2, 6],
        [1, PROMPT, PROMPT, 4, PROMPT, PROMPT, 2, 6],
        [20, 12, 6, 9, 10, 11, 5, 0],
        [20, 9, 5, 9, 9, 9, 5, 1],
    ]
    tokens = slot.staged.host["token"]
    assert [tokens[index] for index in (1, 2, 4, 5)] == [33, 7, 31, 32]
    assert not slot.staged.host["payload"][[1, 2, 4, 5]].any()


# ---------------------------------------------------------------- staging
# Fields that reach the device in one copy.

FIELDS: tuple[Fields, ...] = (
    {"a": ((3,), torch.int64)},
    {"b": ((5,), torch.float32), "c": ((2, 2), torch.int64)},
    {"d": ((1,), torch.int64)},
)


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    made = CpuDevice(1)
    yield made
    made.close()


@pytest.fixture
def buffers(device: CpuDevice) -> list[StagingBuffer]:
    room = StagingRoom(device, sum(map(size_of, FIELDS)))
    return [StagingBuffer(device, fields, room=room, copies=2) for fields in FIELDS]


def on_device(buffers: list[StagingBuffer], device: CpuDevice) -> list[float]:
    """The first element of each field."""
    device.compute.record().wait()
    fields = [field for each in buffers for field in each.device.values()]
    return [float(field.flatten()[0]) for field in fields]


@pytest.mark.parametrize(
    ("first", "seen"), [(0, [1, 2, 3, 4]), (1, [0, 2, 3, 4]), (2, [0, 0, 0, 4])]
)
def test_neighbours_are_one_copy(
    device: CpuDevice, buffers: list[StagingBuffer], first: int, seen: list[float]
) -> None:
    """From a buffer up to a later one, and no other."""
    for number, (buffer, name) in enumerate(
        zip((buffers[0], buffers[1], buffers[1], buffers[2]), "abcd", strict=True), 1
    ):
        buffer.host[name].fill(number)
    buffers[2].upload_from(buffers[first], device.compute)
    assert on_device(buffers, device) == seen


def test_a_later_host_side_is_uploaded_alone(
    device: CpuDevice, buffers: list[StagingBuffer]
) -> None:
    for side, number in zip(buffers[1].hosts, (7, 8), strict=True):
        side["b"].fill(number)
    buffers[1].upload(device.compute, 1)
    assert on_device(buffers, device) == [0, 8, 0, 0]


# ---------------------------------------------------------------- step costs
# Steps are timed over real tokens and contexts, and leave no state.


@pytest.fixture(scope="module")
def assembly():
    """A tiny model with three drafting rows."""
    config = EngineConfig(
        model="random-tiny", device="cpu", threads=1, random_weights=True, max_running=3
    )
    made = with_settings(assemble(config), speculation="budget")
    yield made
    made.device.close()


class Watching:
    """A backend that records what its steps feed."""

    def __init__(self, program, slot, scratch, stream):
        self._backend, self._slot, self._scratch, self._stream = program, slot, scratch, stream
        self.buckets = program.buckets
        self.fed = {}  # by bucket: row and position of each token, and how many rows were told

    def decode(self, slot, bucket, rank, num_rows):
        """Run it, and record rows and positions that the device has found."""
        self._backend.decode(slot, bucket, rank, num_rows)
        self._stream.record().wait()
        staged = self._slot.staged.device
        rows, positions = (staged[name][:bucket].tolist() for name in ("row", "position"))
        tokens = [each for each in zip(rows, positions, strict=True) if each[0] != self._scratch]
        self.fed.setdefault(bucket, (num_rows, tokens))

    def sample(self, slot, bucket, **options):
        """Run it."""
        self._backend.sample(slot, bucket, **options)


def test_every_token_of_a_step_is_fed(assembly, monkeypatch):
    """All rows feed the same number of tokens, at adjacent positions after the context."""
    monkeypatch.setattr(calibration, "_LONG_STEP_SECONDS", math.inf)  # however busy the machine is
    costs = assembly.runner.costs()
    drafts = assembly.runner._drafts
    stream = assembly.device.compute
    watching = Watching(costs._backend, costs._slot, drafts.scratch_row, stream)
    costs._backend = watching
    steps = costs.steps()
    assert tuple(bucket for bucket, _ in steps) == watching.buckets == tuple(watching.fed)
    seconds = [each for _, each in steps]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    most = 3 * (1 + drafts.max_block)
    for bucket, (num_rows, tokens) in watching.fed.items():
        assert num_rows == min(bucket, 3)
        assert len(tokens) == min(bucket, most)
        for row in range(num_rows):
            positions = [position for of, position in tokens if of == row]
            start = positions[0]
            assert start == costs._context > 100
            assert positions == list(range(start, start + len(positions)))


@pytest.mark.parametrize(
    ("weights", "position", "last"),
    [
        pytest.param(0.05, 0.05, 8, id="long, of its positions"),
        pytest.param(0.9, 0.1, 27, id="long, of the weights"),
        pytest.param(0.001, 0.001, 27, id="short"),
    ],
)
def test_steps_beyond_a_long_one_are_estimated(assembly, weights, position, last):
    """A start waits for no longer one, if that is as long as its positions make it."""
    costs, timed = assembly.runner.costs(), []
    buckets = costs._backend.buckets

    def seconds(bucket):
        timed.append(bucket)
        return weights + position * bucket

    costs._seconds = seconds
    steps = costs.steps()
    assert timed == [bucket for bucket in buckets if bucket <= last]
    for bucket, found in steps:
        assert found == pytest.approx(weights + position * bucket)
    assert tuple(bucket for bucket, _ in steps) == buckets


def test_nothing_is_left(assembly):
    """After the measurement no row has a position or tokens."""
    costs, drafts = assembly.runner.costs(), assembly.runner._drafts
    assert costs.propose() >= 0
    costs.steps()
    assert not drafts.position_R.any()
    assert drafts.limit_R.eq(-1).all()
    assert drafts.draft_RK.eq(UNKNOWN).all()
    assert drafts.tokens_RC.eq(UNKNOWN).all()
