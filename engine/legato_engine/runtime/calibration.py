"""Calibration: measured times of loop steps and of verifying drafts."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch

from legato_engine.kernels.decode_loop import ANY, BatchKind, Build
from legato_engine.runtime.autotune import ALL, NONE
from legato_engine.runtime.backend import Needs, StepBackend
from legato_engine.runtime.decode_slot import DraftState, Resources
from legato_engine.runtime.descriptors import DESCRIPTOR, EXACT, STARTS, WORDS
from legato_engine.runtime.loops import DecodeLoops
from legato_engine.runtime.staging import bucket_for
from legato_engine.scheduler.interfaces import LoopPoll, sleep
from legato_engine.sequence import Descriptor
from legato_engine.speculation import INITIAL_RATE, CostTable

Progress = Callable[[float], None]

_TIMES = 5
_PAIRS = 3
_MAX_SHAPE_SECONDS = 0.1  # of measuring one shape
_LONG_STEP_SECONDS = 0.1  # from which on larger steps may be extrapolated
_COMPUTE_BOUND_RATIO = 4  # a step that takes this many times the first is compute-bound
_STEP_CONTEXT = 850  # positions: an image and a short answer
_SLOT = 0


class StepCosts:
    """Measures a backend's steps over the first slot's buffers; nothing may be in flight.

    A start waits for these steps, so long ones are timed fewer times: noise hardly shows in them.
    On a GPU each is timed behind another one, as in service. The shortest time of a shape counts,
    because other load and cold caches only lengthen it.

    Rows read and write the scratch page, so no sequence's pages change.
    """

    def __init__(self, resources: Resources, backend: StepBackend) -> None:
        state = resources.state
        assert state.drafts is not None, "costs are of speculation, which is off"
        self._device = resources.device
        self._backend = backend
        self._slot = resources.slots[_SLOT]
        self._drafts = state.drafts
        self._num_rows = state.scratch_row
        self._context = min(_STEP_CONTEXT, resources.model.max_context // 2)

    def table(self, progress: Progress = lambda fraction: None) -> CostTable:
        """Measure all costs; `progress` is called with the fraction done."""
        steps: list[tuple[int, float]] = []
        for bucket, seconds in self.steps(progress):
            if steps and bucket > steps[-1][0] + 1:
                steps.append((steps[-1][0] + 1, seconds))  # a step is padded to its bucket
            steps.append((bucket, seconds))
        return CostTable(steps=tuple(steps), prefill=0.0, propose=self.propose())

    def steps(self, progress: Progress = lambda fraction: None) -> tuple[tuple[int, float], ...]:
        """Measure a step's seconds by bucket, made monotonic.

        Beyond a long step they are extrapolated from the first step through that one.
        """
        buckets = self._backend.buckets
        seconds: list[float] = []
        for done, bucket in enumerate(buckets):
            progress(done / (len(buckets) + 1))
            seconds.append(self._seconds(bucket))
            if seconds[-1] > max(_LONG_STEP_SECONDS, _COMPUTE_BOUND_RATIO * seconds[0]):
                break
        measured = tuple(zip(buckets, accumulate(seconds, max), strict=False))
        return (*measured, *_on_line(measured[0], measured[-1], buckets[len(measured) :]))

    def propose(self) -> float:
        """Measure the seconds of one more draft token in the longest block.

        It is the small difference of two steps, so both are timed in turn.
        """
        block, least = self._drafts.max_block, self._backend.buckets[0]
        pairs = [
            (self._seconds(least, block, times=1), self._seconds(least, times=1))
            for _ in range(_PAIRS)
        ]
        proposing, plain = (min(each) for each in zip(*pairs, strict=True))
        seconds: float = max(0.0, proposing - plain) / block
        return seconds

    def _seconds(self, bucket: int, block: int = 0, *, times: int = _TIMES) -> float:
        """Return the shortest time of full steps after a proposal of `block` tokens."""
        rooms = self._rooms(bucket)
        staged = self._slot.staged.host
        staged["scheduled_row"].fill(self._drafts.scratch_row)
        staged["scheduled_row"][: len(rooms)] = range(len(rooms))
        staged["room"][: len(rooms)] = rooms
        staged["control"][:] = EXACT, self._drafts.proposal_for(block)
        seconds: list[float] = []
        end = time.monotonic() + _MAX_SHAPE_SECONDS
        while not seconds or (len(seconds) < times and time.monotonic() < end):
            seconds.append(self._timed(bucket, len(rooms)))
        staged["scheduled_row"].fill(self._drafts.scratch_row)
        staged["control"].fill(0)
        self._device.compute.submit(self._drafts.clear)
        self._device.compute.record().wait()
        return min(seconds)

    def _rooms(self, bucket: int) -> Sequence[int]:
        """Return the draft tokens of each row, so that all rows together fill the bucket."""
        rows = min(bucket, self._num_rows)
        counts = (bucket // rows + (row < bucket % rows) for row in range(rows))
        return [min(count - 1, self._drafts.max_block) for count in counts]

    def _timed(self, bucket: int, num_rows: int) -> float:
        """Time a step; on a GPU one that is enqueued while another runs, as in service."""
        compute = self._device.compute
        spare = 2 * self._drafts.max_block + 2
        compute.submit(lambda: self._drafts.set_calibration_rows(self._context, spare=spare))
        if self._device.torch_device.type != "cpu":
            self._step(bucket, num_rows)
        start = compute.record()
        self._step(bucket, num_rows)
        stop = compute.record()
        stop.wait()
        return (stop.time_ns() - start.time_ns()) / 1e9

    def _step(self, bucket: int, num_rows: int) -> None:
        self._slot.staged.upload(self._device.compute)
        self._backend.decode(_SLOT, bucket, 0, num_rows)
        self._backend.sample(_SLOT, bucket, sampled=False, payload=False)


def _on_line(
    first: tuple[int, float], last: tuple[int, float], buckets: Sequence[int]
) -> Iterator[tuple[int, float]]:
    (least, fastest), (most, slowest) = first, last
    for bucket in buckets:
        yield bucket, fastest + (slowest - fastest) * (bucket - least) / (most - least)


# ---------------------------------------------------------------- loop times

_STEPS = 10
_LOOP_CONTEXT = 512  # positions: an image, a question and half of an answer
_COMMON_FRACTION = 0.75  # of a row's pages: the image's
_TEMPERATURE, _TOP_P = 0.7, 0.9  # of drawn rows
_FREE = 0  # the constraint of words


def own_hash() -> str:
    """Hash this file, so that stored times match the way they were measured."""
    return hashlib.sha256(inspect.getsource(sys.modules[__name__]).encode()).hexdigest()[:32]


class LoopTimes:
    """Measures loop steps over the first slot's buffers; nothing may be in flight.

    Rows read pages of their own, or share some as requests about one image do, and write to the
    scratch page only. Rows with values emit one value per step and no drafts. Drafting rows repeat
    one token, so that all drafts are accepted. In drawn batches with values every other row emits
    words, because a value's token is drawn from a single candidate.
    """

    def __init__(self, resources: Resources, loops: DecodeLoops) -> None:
        self._resources = resources
        self._loops = loops
        self._context = min(_LOOP_CONTEXT, resources.model.max_context // 2)
        self._context -= self._context % resources.kv.page_size
        known = [each.allowed for each in resources.model.constraints]
        self._lone = [index for index, each in enumerate(known) if each and len(each) == 1]

    @contextlib.contextmanager
    def calibrating(self) -> Iterator[None]:
        """Install sampling parameters and pinned constraints; restore them and the pages after."""
        resources, state = self._resources, self._resources.state
        successor_C2 = resources.successor_C2
        rules = (state.temperature_R, state.top_p_R, state.top_k_R, state.seed_R)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []

        def begin() -> None:
            changed = (state.page_table_RM, *rules, successor_C2)
            kept.extend((each, each.clone()) for each in changed)
            state.top_p_R.fill_(_TOP_P)
            state.top_k_R.zero_()
            state.seed_R.copy_(torch.arange(len(state.seed_R)))
            successor_C2[:, 0] = ANY
            successor_C2[:, 1] = torch.arange(len(successor_C2), device=successor_C2.device)

        def end() -> None:
            for each, copy in kept:
                each.copy_(copy)
            if state.drafts is not None:
                state.drafts.clear()

        resources.compute.submit(begin)
        try:
            yield
        finally:
            resources.compute.submit(end)
            resources.compute.record().wait()

    def seconds(
        self, kind: BatchKind, num_rows: int, *, drawn: bool, common: bool, in_megakernel: bool
    ) -> float:
        """Time one step; call inside `calibrating()`."""
        resources, loops = self._resources, self._loops
        compute, slot = resources.compute, resources.slots[_SLOT]
        before, loops.choice = loops.choice, ALL if in_megakernel else NONE

        def set_rows() -> None:
            resources.state.temperature_R.fill_(_TEMPERATURE if drawn else 0.0)
            self._take_pages(common=common)

        try:
            compute.submit(set_rows)
            num_rows, num_tokens = self._stage(kind, num_rows, drawn)
            slot.staged.upload(compute)
            slot.constraint.upload(compute)
            begun = compute.record()
            needs = Needs(sampled=drawn, payload=kind.has_values, logprobs=False)
            bucket = bucket_for(resources.buckets, num_tokens)
            loops.start(_SLOT, num_rows, num_tokens, bucket, 0, _STEPS, needs, common)
            ended = compute.record()
            num_steps = 0
            while loops.next_outputs(_SLOT, ended, sleep) is not LoopPoll.FINISHED:
                num_steps += 1
            loops.restore(_SLOT)
        finally:
            loops.choice = before
        return (ended.time_ns() - begun.time_ns()) / 1e9 / max(1, num_steps)

    def _take_pages(self, *, common: bool) -> None:
        """Fill page tables up to the context, with mostly shared pages if `common`.

        Otherwise pages are distinct, as far as the pool has enough.
        """
        resources = self._resources
        table_RM, num_pages = resources.state.page_table_RM, resources.kv.k_LNHSE.shape[1]
        rows, width = resources.state.scratch_row, self._context // resources.kv.page_size
        pages = torch.arange(rows * width, device=table_RM.device).view(rows, width)
        table_RM.zero_()
        table_RM[:rows, :width] = 1 + pages % (num_pages - 1)
        if common:
            shared = int(_COMMON_FRACTION * width)
            table_RM[:rows, :shared] = table_RM[0, :shared].clone()

    def _repeat(self, drafts: DraftState, token: int) -> None:
        """Fill all rows' histories up to the context with one token, with more tokens to go."""
        drafts.clear()
        drafts.tokens_RC[:, : self._context + 1] = token
        drafts.position_R.fill_(self._context)
        drafts.limit_R.fill_(self._resources.model.max_context - 1)
        words = np.zeros(WORDS, dtype=np.int64)
        words.view(DESCRIPTOR)[0] = Descriptor(0.0, 0.0, INITIAL_RATE, 0, 0, STARTS)
        drafts.descriptor_R4.copy_(torch.from_numpy(words).expand_as(drafts.descriptor_R4))
        self._resources.state.token_R.fill_(token)

    def _constraints(self, kind: BatchKind, drawn: bool) -> list[int]:
        """Return the constraints to assign to rows in turn."""
        if kind is BatchKind.WORDS or not self._lone:
            return [_FREE]
        if kind is BatchKind.DRAFTS:
            return self._lone[:1]
        return [index for each in self._lone for index in (each, _FREE)] if drawn else self._lone

    def _stage(self, kind: BatchKind, count: int, drawn: bool) -> tuple[int, int]:
        """Stage rows at the end of the context that count as `count` rows.

        Return the number of rows and the maximum tokens of a step.
        """
        slot, scratch_row = self._resources.slots[_SLOT], self._resources.state.scratch_row
        num_rows = min(count, scratch_row)
        staged, constraint = slot.staged.host, slot.constraint.host["constraint"]
        cycle = self._constraints(kind, drawn)
        constraint[:num_rows] = [cycle[row % len(cycle)] for row in range(num_rows)]
        drafts = self._resources.state.drafts
        if drafts is not None:
            allowed = self._resources.model.constraints[cycle[0]].allowed or (0,)
            self._resources.compute.submit(lambda: self._repeat(drafts, allowed[0]))
            staged["scheduled_row"].fill(scratch_row)
            staged["scheduled_row"][:num_rows] = range(num_rows)
            staged["room"][:num_rows] = 0 if kind.has_values else drafts.max_block
            staged["reach"][:num_rows] = self._resources.model.max_context
            staged["control"].fill(0)
            return num_rows, Build(kind, count).tokens(drafts.max_block)
        for name in ("row", "source", "sample_row"):
            staged[name].fill(scratch_row)
            staged[name][:num_rows] = range(num_rows)
        staged["position"].fill(0)
        staged["position"][:num_rows] = self._context
        staged["fresh"][:] = staged["position"]
        staged["fresh"][num_rows:] = 1  # above their position: padding
        staged["sample_position"][:] = staged["position"] + 1
        return num_rows, num_rows
