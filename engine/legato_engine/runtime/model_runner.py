"""Runs launches on a device: stage, forward, sample, copy back.

Nothing on the decode path allocates memory, and nothing but `collect` waits. Work handed to a
stream reads only what its slot owns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

from legato_engine.device.base import Device, Event
from legato_engine.layers.lora import AdapterBank
from legato_engine.models.model import MaskRefiner, Model
from legato_engine.models.paged_cache import KVCache
from legato_engine.models.step_kernels import StepKernels
from legato_engine.runtime.backend import Backend
from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.draft_state import DraftState
from legato_engine.runtime.refine_step import RefineStep
from legato_engine.runtime.row_state import RowState
from legato_engine.runtime.sampler import GREEDY_TEMPERATURE
from legato_engine.runtime.step_costs import StepCosts
from legato_engine.runtime.step_staging import StepStaging, num_sampled
from legato_engine.runtime.torch_backend import TorchBackend
from legato_engine.scheduler.launch import BatchLimits, Launch, LaunchKind, Row
from legato_engine.scheduler.runner import LaunchTimes, RowTokens
from legato_engine.speculative.proposer import Proposer
from legato_engine.tasks import SampledToken

NUM_SLOTS = 2
SHARED_PROMPTS = 4
"""Prompts of a launch: a question is some 20 tokens, and a launch has room for 128."""


@dataclasses.dataclass(slots=True)
class LaunchEvents:
    """The events of a slot's launch; the next launch in the slot records them anew.

    `logprobs` says whether it computed any.
    """

    forward_start: Event
    forward_end: Event
    sample_start: Event
    sample_end: Event
    copy_end: Event
    logprobs: bool = dataclasses.field(default=False, kw_only=True)


class ModelRunner:
    """A `scheduler.runner.Runner` over a `Model`, a `Device` and one KV pool.

    `buckets` are the decode batch sizes that exist, in tokens, rising: a launch is padded to the
    next one. With a `proposer` a row may feed `max_block` proposed tokens behind its own.
    """

    def __init__(
        self,
        model: Model,
        device: Device,
        kv: KVCache,
        *,
        max_running: int,
        buckets: Sequence[int],
        cuda_graphs: bool = True,
        adapters: AdapterBank | None = None,
        proposer: Proposer | None = None,
        max_block: int = 0,
        max_prompts: int = 0,
        max_images: int = 1,
        refiner: MaskRefiner | None = None,
    ) -> None:
        """`adapters` is where rows find theirs; without it no row has one. Without a `refiner` no
        launch refines.

        At most `max_prompts` share a launch. 0: as many as are worth it, which is 1 where they
        share no pass of the weights, and with a proposer. Of pictures that the device cuts
        `max_images` share one, if prompts do.
        """
        max_pages = -(-model.max_context // kv.page_size)
        self._device = device
        self._max_context = model.max_context
        self._drafts = None
        if proposer is not None:
            self._drafts = DraftState(
                proposer,
                num_rows=max_running,
                max_context=model.max_context,
                vocab_size=model.vocab_size,
                width=model.width,
                max_block=max_block,
                dtype=model.dtype,
                device=device.torch_device,
            )
        self._state = RowState(max_running, max_pages, device.torch_device, self._drafts)
        kernels = model.step_kernels(kv, adapters)
        if proposer is not None:
            max_prompts = 1
        max_prompts = max_prompts or (SHARED_PROMPTS if kernels is not None else 1)
        self._slots = tuple(
            DecodeSlot(
                device,
                max_rows=buckets[-1],
                max_pages=max_pages,
                max_prompt=model.max_context,
                max_prompts=max_prompts,
                max_images=max_images if max_prompts > 1 else 1,
                width=model.width,
                vocab_size=model.vocab_size,
                dtype=model.dtype,
                speculates=proposer is not None,
            )
            for _ in range(NUM_SLOTS)
        )
        self._flights = [
            LaunchEvents(*(device.compute.record() for _ in range(5))) for _ in self._slots
        ]
        self._adapters = adapters
        capture = device.capture if cuda_graphs else _run_directly
        self._backend = _backend(
            model, kernels, device, kv, self._state, self._slots, adapters, tuple(buckets), capture
        )
        self._refine = None
        if refiner is not None:
            self._refine = RefineStep(refiner, device, NUM_SLOTS, capture)
        self._staging = StepStaging(self._state, self._backend.buckets, kv.page_size)

    @property
    def encodes_images(self) -> bool:
        """Whether it takes pictures left whole; else every picture has to come as crops."""
        return self._backend.encodes_images

    @property
    def limits(self) -> BatchLimits:
        """What fits a launch that prompts share."""
        return self._backend.limits

    def warm_up(self) -> None:
        """Capture (or once run) every shape, so that no launch pays for it later."""
        for slot in self._slots:
            self._staging.padding(slot)
            slot.grown.upload(self._device.compute)
            slot.staged.upload(self._device.compute)
            slot.prompt.upload(self._device.compute)
        self._backend.warm_up()
        if self._refine is not None:
            self._refine.warm_up()
        self._device.compute.record().wait()

    def costs(self) -> StepCosts:
        """What a step costs that verifies proposals; nothing may be in flight."""
        assert self._drafts is not None, "nobody proposes"
        slot, state = self._slots[0], self._state
        rows, context = state.scratch_row, self._max_context
        return StepCosts(
            self._device, self._backend, slot, self._drafts, num_rows=rows, max_context=context
        )

    def forward(self, launch: Launch) -> None:
        """Stage the rows and enqueue the forward pass."""
        rows, compute, flight = launch.plan.rows, self._device.compute, self._flights[launch.slot]
        slot = self._slots[launch.slot]
        if launch.plan.kind is LaunchKind.DECODE:
            bucket = self._staging.rows(slot, rows)
            flight.forward_start = compute.record(flight.forward_start)
            slot.staged.upload(compute)
            self._grow(launch.slot, rows)
            self._backend.decode(launch.slot, bucket, self._rank(rows), len(rows))
        else:
            flight.forward_start = compute.record(flight.forward_start)
            if launch.plan.refinement is not None:
                assert self._refine is not None, "nothing to refine with"
                self._refine.forward(launch.slot, launch.plan.refinement.given)
            elif launch.plan.kind is LaunchKind.ENCODE:
                self._backend.encode(launch.slot, rows[0])
            else:
                prompts, decodes = launch.plan.prefills, launch.plan.decodes
                self._grow(launch.slot, decodes)
                self._backend.prefill(launch.slot, prompts, decodes, self._rank(decodes))
        flight.forward_end = compute.record(flight.forward_end)

    def sample(self, launch: Launch, constraints: Sequence[int]) -> None:
        """Upload the constraints on the copy stream, sample, and start the copy back."""
        slot, flight = self._slots[launch.slot], self._flights[launch.slot]
        compute, copy = self._device.compute, self._device.copy
        rows = launch.plan.sampled_rows
        if rows:
            num_sampled = self._staging.constraints(slot, rows, constraints)
            slot.constraint.upload(copy)
            flight.copy_end = copy.record(flight.copy_end)
            compute.wait_event(flight.copy_end)
        flight.sample_start = compute.record(flight.sample_start)
        if rows:
            sampled, payload, flight.logprobs = _needs(rows)
            bucket = self._staging.bucket(num_sampled)
            self._backend.sample(launch.slot, bucket, sampled=sampled, payload=payload)
            if flight.logprobs:
                self._backend.logprobs(launch.slot, bucket, payload=payload)
        flight.sample_end = compute.record(flight.sample_end)
        copy.wait_event(flight.sample_end)
        if rows:
            slot.outputs.download(copy)
        flight.copy_end = copy.record(flight.copy_end)

    def collect(self, launch: Launch) -> list[RowTokens]:
        """Wait for the copy back and read every sampled row's tokens."""
        flight, rows = self._flights[launch.slot], launch.plan.sampled_rows
        flight.copy_end.wait()
        if launch.plan.refinement is not None and self._refine is not None:
            launch.plan.refinement.answer = self._refine.answer(launch.slot)
        if not rows:
            return []
        outputs = self._slots[launch.slot].outputs.host
        count = len(rows) if self._drafts is None else sum(map(num_sampled, rows))
        fields: list[Iterable[Any]] = [
            outputs["token"][:count].tolist(),
            map(tuple, outputs["payload"][:count].tolist()),
            outputs["logprob"][:count].tolist() if flight.logprobs else repeat(None),
        ]
        tokens = map(SampledToken._make, zip(*fields, strict=False))
        if self._drafts is None:
            return list(map(RowTokens._make, zip(zip(tokens, strict=False), repeat(0))))
        return _by_row(rows, tuple(tokens), outputs["count"].tolist(), outputs["proposed"].tolist())

    def times(self, launch: Launch) -> LaunchTimes:
        """Device times of a collected launch."""
        flight = self._flights[launch.slot]
        return LaunchTimes(
            forward_start=flight.forward_start.time_ns(),
            forward_end=flight.forward_end.time_ns(),
            sample_start=flight.sample_start.time_ns(),
            sample_end=flight.sample_end.time_ns(),
            copy_end=flight.copy_end.time_ns(),
        )

    def _rank(self, rows: Sequence[Row]) -> int:
        """The rank to run for all rows, 0 when none has an adapter."""
        if self._adapters is None:
            return 0
        return self._adapters.bucket(max((row.sequence.adapter_rank for row in rows), default=0))

    def _grow(self, index: int, decodes: Sequence[Row]) -> None:
        """Tell the device of the pages that these are the first to name."""
        slot = self._slots[index]
        if self._staging.grown(slot, decodes):
            slot.grown.upload(self._device.compute)
            self._backend.grow(index)


def _by_row(
    rows: Sequence[Row],
    tokens: tuple[SampledToken, ...],
    counts: Sequence[int],
    proposed: Sequence[int],
) -> list[RowTokens]:
    """The lanes' tokens that stand; the counts are those at each row's first lane."""
    outputs, first = [], 0
    for row in rows:
        outputs.append(RowTokens(tokens[first : first + counts[first]], proposed[first]))
        first += num_sampled(row)
    return outputs


def _needs(rows: Sequence[Row]) -> tuple[bool, bool, bool]:
    """Whether any row is sampled, has a payload, wants log-probabilities."""
    sampled = payload = logprobs = False
    for row in rows:
        task = row.sequence.task
        sampled = sampled or (task.sampling.temperature or 0.0) > GREEDY_TEMPERATURE
        payload = payload or task.has_payload
        logprobs = logprobs or row.sequence.request.logprobs
    return sampled, payload, logprobs


def _backend(
    model: Model,
    kernels: StepKernels | None,
    device: Device,
    kv: KVCache,
    state: RowState,
    slots: Sequence[DecodeSlot],
    bank: AdapterBank | None,
    buckets: tuple[int, ...],
    capture: Callable[[Callable[[], None]], Callable[[], None]],
) -> Backend:
    """By kernels where the model has some for this device, by its torch operations elsewhere."""
    if kernels is None:
        return TorchBackend(model, device, kv, state, slots, bank, buckets, capture)
    from legato_engine.runtime.kernel_backend import KernelBackend

    return KernelBackend(model, kernels, device, kv, state, slots, bank, buckets, capture)


def _run_directly(work: Callable[[], None]) -> Callable[[], None]:
    return work
