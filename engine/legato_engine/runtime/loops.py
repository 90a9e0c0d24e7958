"""Decode loops on the device and the polling of their tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import structlog
import torch

from legato_engine.device.base import DeviceEvent
from legato_engine.kernels.accelerated import WhileLoop
from legato_engine.kernels.decode_loop import (
    BatchKind,
    DraftLoopTensors,
    Loop,
    LoopTensors,
    MegakernelRows,
    MegakernelSteps,
    follow,
)
from legato_engine.runtime.autotune import ALL, PathTable
from legato_engine.runtime.backend import Needs, StepBackend
from legato_engine.runtime.buffers import TokenRing
from legato_engine.runtime.decode_slot import Resources
from legato_engine.runtime.drafting import DraftLaunches
from legato_engine.runtime.graphs import Work
from legato_engine.scheduler.interfaces import LoopPoll, Pause
from legato_engine.scheduler.loops import MAX_STEPS

_POLL_SECONDS = 2e-5
_SLEEP_FRACTION = 0.7  # of a step, before its outputs are polled
_MAX_SLEEP_SECONDS = 5e-3


class PollTimer:
    """Polling schedule for the outputs of a loop, whose steps take about equally long."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the last loop: the first step of the next may wait for a whole launch."""
        self._found_at = self._step_seconds = 0.0

    def found(self) -> None:
        now = time.perf_counter()
        if self._found_at > 0.0:
            self._step_seconds = now - self._found_at
        self._found_at = now

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to sleep after each poll: first most of a step, then little."""
        rest = self._found_at + _SLEEP_FRACTION * self._step_seconds - time.perf_counter()
        yield min(max(rest, _POLL_SECONDS), _MAX_SLEEP_SECONDS)
        while True:
            yield _POLL_SECONDS


def host_loop(works: tuple[Work, ...], loop: Loop) -> Work:
    """Repeat `works` and the control step until that ends the loop, without CUDA graphs."""

    def work() -> None:
        while True:
            for each in works:
                each()
            if not loop.control_step():
                return

    return work


# ---------------------------------------------------------------- decode loop

# The rows have pages for all steps, and the device advances their constraints with the model's
# transition table. The host polls a ring for the outputs and may stop the loop after any step. The
# launch is the megakernel's where that runs its batch, else captured steps.

_log = structlog.get_logger()

_MIN_MEGAKERNEL_STEPS, _MIN_CAPTURED_STEPS = 2, 8  # captured steps gain little over single ones


class DecodeLoops:
    """The loops of every slot; each is made once per batch shape."""

    def __init__(
        self,
        resources: Resources,
        backend: StepBackend,
        megakernel: MegakernelSteps | None = None,
        choice: PathTable = ALL,
    ) -> None:
        """Create the loops; `choice` decides which eligible launches use the `megakernel`."""
        on = resources.device.torch_device
        self._resources = resources
        self._backend = backend
        self._megakernel = megakernel
        self.choice = choice
        self._rings = [
            TokenRing(resources.device, slot.outputs, max_steps=MAX_STEPS)
            for slot in resources.slots
        ]
        drafts = megakernel is not None and any(kind.has_drafts for kind in megakernel.max_rows)
        self._drafting = DraftLaunches(resources, self._rings) if drafts else None
        self._in_megakernel = [False for _ in resources.slots]  # the latest loop of each slot
        self._progress_2 = torch.zeros(2, dtype=torch.int64, device=on)
        self._limit, self._step = self._progress_2[:1], self._progress_2[1:]
        limits = torch.arange(MAX_STEPS + 1, device=on)
        self._beginnings = torch.stack((limits, torch.zeros_like(limits)), dim=1).unbind()
        self._poll_timer = PollTimer()
        self._made: dict[tuple[int, int, int, Needs], Work] = {}
        self._by_works: dict[tuple[Work, ...], Work] = {}

    def warm_up(self) -> None:
        """Make every loop that a launch may need; run a megakernel step of padding, no other."""
        slots, resources = range(len(self._rings)), self._resources
        needs = {_widened(Needs(*each)) for each in product((False, True), repeat=3)}
        for slot, bucket, rank in product(slots, resources.buckets, resources.ranks):
            for each in sorted(needs):
                self._loop(slot, bucket, rank, each)
        if self._megakernel is not None:
            for kind in filter(self._max_rows, self._megakernel.max_rows):
                plain = Needs(sampled=False, payload=kind.has_values, logprobs=False)
                for slot in slots if kind.has_drafts else (0,):
                    self._submit(self._megakernel, slot, 1, 1, num_steps=1, needs=plain)
        for slot in slots:
            self.follow(slot)

    def follow(self, slot: int) -> None:
        """Enqueue the transitions of constraints after the tokens of the other slot's launch."""
        self._resources.graphs.run(self._follow_work, slot)

    def start(
        self,
        slot: int,
        num_rows: int,
        num_tokens: int,
        bucket: int,
        rank: int,
        num_steps: int,
        needs: Needs,
        common: bool,
    ) -> None:
        """Enqueue at most `num_steps` steps of up to `num_tokens` tokens, or none if that is 0.

        Rows and constraints are staged. `common`: most rows share their leading pages, as in
        `PathTable`.
        """
        self._rings[slot].reset()
        self._poll_timer.begin()
        megakernel = None
        if not (rank or needs.logprobs):
            megakernel = self._kernel_for(num_rows, num_tokens, needs, common)
        self._in_megakernel[slot] = megakernel is not None
        if megakernel is not None:
            if num_steps:
                self._submit(megakernel, slot, num_rows, num_tokens, num_steps, needs)
            return
        loop = self._loop(slot, bucket, rank, _widened(needs))
        if num_steps:
            compute = self._resources.compute
            compute.copy(self._progress_2, self._beginnings[num_steps])
            compute.submit(loop)

    @property
    def megakernel_rows(self) -> int:
        """Return the maximum rows of the megakernel's launches; 0 without it or after a timeout."""
        megakernel = self._megakernel
        return 0 if megakernel is None else max(map(self._max_rows, megakernel.max_rows))

    def _max_rows(self, kind: BatchKind) -> int:
        assert self._megakernel is not None, "rows of no kernel"
        rows = range(self._megakernel.max_rows[kind], 0, -1)
        takes, ways = self.choice.takes, tuple(product((False, True), repeat=2))

        def any_way(count: int) -> bool:
            return any(takes(kind, count, drawn=drawn, common=common) for drawn, common in ways)

        return next(filter(any_way, rows), 0)

    def _kernel_for(
        self, num_rows: int, num_tokens: int, needs: Needs, common: bool
    ) -> MegakernelSteps | None:
        megakernel = self._megakernel
        kind = BatchKind.of(values=needs.payload, drafts=self._drafting is not None)
        count = kind.counts_as(num_rows, num_tokens)
        if megakernel is None or count > megakernel.max_rows.get(kind, 0):
            return None
        takes = self.choice.takes(kind, count, drawn=needs.sampled, common=common)
        return megakernel if takes else None

    def without_kernel(self) -> None:
        """Run all loops by captured steps; nothing may be in flight."""
        self._megakernel = self._drafting = None

    def stop(self, slot: int) -> None:
        self._rings[slot].stop()

    def break_even_steps(self, slot: int) -> int:
        """Return the steps needed to amortise the overhead of a loop like the slot's latest."""
        return _MIN_MEGAKERNEL_STEPS if self._in_megakernel[slot] else _MIN_CAPTURED_STEPS

    def next_outputs(
        self, slot: int, end: DeviceEvent, pause: Pause
    ) -> Mapping[str, np.ndarray] | LoopPoll:
        """Wait for the next step's outputs; none are left once the loop's `end` has completed."""
        ring, pauses = self._rings[slot], self._poll_timer.pauses()
        while True:
            ended = end.query()  # first: outputs are there before it
            outputs = ring.read()
            if outputs is not None:
                self._poll_timer.found()
                return outputs
            if ended:
                end.wait()  # raises the device's failure
                return LoopPoll.FINISHED
            if pause(next(pauses)):
                return LoopPoll.PENDING

    def restore(self, slot: int) -> bool:
        """After a timeout in the megakernel, restore the rows to the last step in the ring.

        Later loops use captured steps. Return whether the state of rows was reset to an earlier
        step, so that a decode queued behind the launch does not count.
        """
        if self._megakernel is None or not (fault := self._megakernel.fault()):
            return False
        _log.error("megakernel_timeout", wait=fault)
        self._megakernel = None
        if (drafting := self._drafting) is not None:
            compute = self._resources.compute
            compute.submit(lambda: drafting.restore(slot))
            compute.record().wait()
        return drafting is not None

    def _submit(
        self,
        megakernel: MegakernelSteps,
        slot: int,
        num_rows: int,
        num_tokens: int,
        num_steps: int,
        needs: Needs,
    ) -> None:
        buffers, ring, state = self._resources.slots[slot], self._rings[slot], self._resources.state
        staged = buffers.staged.device
        rows = MegakernelRows(
            row_B=staged["row"],
            constraint_B=buffers.constraint.device["constraint"],
            position_B=staged["position"],
            sample_position_B=staged["sample_position"],
            state=state,
            page_table_RM=state.page_table_RM,
            constraints_CV=self._resources.constraints_CV,
            successor_C2=self._resources.successor_C2,
            ring_SB=ring.fields["token"],
            payload_SB2=ring.fields["payload"],
            certainty_SB2=ring.fields["certainty"],
            words=ring.words,
            drafts=None if self._drafting is None else self._drafting.begin(slot),
        )
        self._resources.compute.submit(
            lambda: megakernel.run(
                rows,
                num_rows,
                num_steps,
                payload=needs.payload,
                num_tokens=num_tokens,
            )
        )

    def _follow_work(self, slot: int) -> Work:
        slots, successor_C2 = self._resources.slots, self._resources.successor_C2
        staged, token_R = slots[slot].constraint.device, slots[1 - slot].tokens_R
        return lambda: follow(successor_C2, staged["constraint"], token_R, staged["after"])

    def _loop(self, slot: int, bucket: int, rank: int, needs: Needs) -> Work:
        key = (slot, bucket, rank, needs)
        if key not in self._made:
            works = self._backend.loop_works(*key)
            if works not in self._by_works:
                loop = self._tensors(slot, bucket)
                make = WhileLoop if loop.step.is_cuda else host_loop
                self._by_works[works] = make(works, loop)
            self._made[key] = self._by_works[works]
        return self._made[key]

    def _tensors(self, slot: int, bucket: int) -> Loop:
        buffers, ring, state = self._resources.slots[slot], self._rings[slot], self._resources.state
        drafts, staged = state.drafts, buffers.staged.device
        size = bucket if drafts is None else drafts.num_rows
        fields: dict[str, Any] = {
            "token_B": buffers.tokens_R if drafts is not None else buffers.tokens_R[:bucket],
            "constraint_B": buffers.constraint.device["constraint"][:size],
            "successor_C2": self._resources.successor_C2,
            "outputs_N": buffers.outputs.device_bytes,
            "limit": self._limit,
            "step": self._step,
            "ring_SN": ring.ring_SN,
            "words": ring.words,
            "scratch_row": state.scratch_row,
        }
        if drafts is None:
            return LoopTensors(
                **fields,
                row_B=staged["row"][:size],
                position_B=staged["position"][:size],
                fresh_B=staged["fresh"][:size],
                sample_position_B=staged["sample_position"][:size],
            )
        return DraftLoopTensors(
            **fields,
            row_B=staged["scheduled_row"],
            room_B=staged["room"],
            reach_B=staged["reach"],
            start_B=staged["start"],
            count_B=buffers.outputs.device["count"],
            position_R=drafts.position_R,
            limit_R=drafts.limit_R,
        )


def _widened(needs: Needs) -> Needs:
    """Merge needs: log-probabilities are rare, so one loop with values serves all of them."""
    return needs._replace(payload=True) if needs.logprobs else needs
