"""Runs launches on a device: stage, forward, sample, copy back.

Nothing on the decode path allocates host memory that the device reads, and nothing but `collect`
waits. Work handed to a stream reads only what its slot owns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from legato_engine.device.base import Device, Event
from legato_engine.models.model import KVCache, Model
from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.decode_step import DecodeStep
from legato_engine.runtime.prefill_step import PrefillStep, stage_prefill
from legato_engine.runtime.row_state import RowState
from legato_engine.runtime.sampler import GREEDY_TEMPERATURE, constraint_table
from legato_engine.scheduler.launch import Launch, LaunchKind, Row
from legato_engine.scheduler.runner import LaunchTimes
from legato_engine.tasks import SampledToken

NUM_SLOTS = 2


@dataclasses.dataclass(slots=True)
class Flight:
    """The events of one launch; its last holder is the slot's next launch."""

    forward_start: Event
    forward_end: Event
    sample_start: Event | None = None
    sample_end: Event | None = None
    copy_end: Event | None = None


class ModelRunner:
    """A `scheduler.runner.Runner` over a `Model`, a `Device` and one KV pool.

    `buckets` are the decode batch sizes that exist, rising: a launch is padded to the next one.
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
    ) -> None:
        max_pages = -(-model.max_context // kv.page_size)
        self._model = model
        self._device = device
        self._kv = kv
        self._buckets = tuple(buckets)
        self._capture = device.capture if cuda_graphs else _run_directly
        self._state = RowState(max_running, max_pages, device.torch_device)
        self._constraints_CV = constraint_table(model.constraints, model.vocab_size).to(
            device.torch_device
        )
        self._slots = tuple(
            DecodeSlot(
                device,
                max_rows=self._buckets[-1],
                max_pages=max_pages,
                max_prompt=model.max_context,
                width=model.width,
                vocab_size=model.vocab_size,
                dtype=model.dtype,
            )
            for _ in range(NUM_SLOTS)
        )
        self._flights: list[Flight | None] = [None] * NUM_SLOTS
        self._forwards: dict[tuple[int, int], Callable[[], None]] = {}
        self._samples: dict[tuple[int, int, bool, bool], Callable[[], None]] = {}

    def warm_up(self) -> None:
        """Capture (or once run) every decode shape, so that no launch pays for it later."""
        for slot in range(NUM_SLOTS):
            self._slots[slot].staged.host["row"].fill(self._state.scratch_row)
            self._device.compute.submit(self._slots[slot].staged.upload)
            for bucket in self._buckets:
                self._device.compute.submit(self._forward_work(slot, bucket))
                for sampled in (False, True):
                    for payload in (False, True):
                        work = self._sample_work(slot, bucket, sampled, payload)
                        self._device.compute.submit(work)
        self._device.compute.record().wait()

    def forward(self, launch: Launch) -> None:
        """Stage the rows and enqueue the forward pass."""
        slot = self._slots[launch.slot]
        rows = launch.plan.rows
        bucket = self._bucket(len(rows))
        compute = self._device.compute
        self._stage_rows(slot, rows, bucket)
        if launch.plan.kind is LaunchKind.PREFILL:
            assert len(rows) == 1, "a prefill is one sequence: its slot stages one prompt"
            stage_prefill(slot, rows[0])
            work: Callable[[], None] = PrefillStep(
                self._model, self._kv, self._state, slot, rows[0]
            )
        else:
            work = self._forward_work(launch.slot, bucket)
        start = compute.record()
        compute.submit(slot.staged.upload)
        compute.submit(work)
        self._flights[launch.slot] = Flight(start, compute.record())

    def sample(self, launch: Launch, constraints: Sequence[int]) -> None:
        """Upload the constraints on the copy stream, sample, and start the copy back."""
        slot = self._slots[launch.slot]
        rows = launch.plan.rows
        flight = self._flight(launch)
        compute, copy = self._device.compute, self._device.copy
        slot.constraint.host["constraint"][: len(rows)] = constraints
        copy.submit(slot.constraint.upload)
        compute.wait_event(copy.record())
        tasks = [row.sequence.task for row in rows]
        sampled = any((task.sampling.temperature or 0.0) > GREEDY_TEMPERATURE for task in tasks)
        payload = any(task.has_payload for task in tasks)
        flight.sample_start = compute.record()
        compute.submit(self._sample_work(launch.slot, self._bucket(len(rows)), sampled, payload))
        flight.sample_end = compute.record()
        copy.wait_event(flight.sample_end)
        copy.submit(_CopyBack(slot))
        flight.copy_end = copy.record()

    def collect(self, launch: Launch) -> list[SampledToken]:
        """Wait for the copy back and read one token per row."""
        flight = self._flight(launch)
        assert flight.copy_end is not None, "collect before sample"
        flight.copy_end.wait()
        slot = self._slots[launch.slot]
        count = len(launch.plan.rows)
        tokens: list[int] = slot.tokens_host[:count].tolist()
        payloads: list[list[float]] = slot.payload_host[:count].tolist()
        return [
            SampledToken(token, (first, second))
            for token, (first, second) in zip(tokens, payloads, strict=True)
        ]

    def times(self, launch: Launch) -> LaunchTimes:
        """Device times of a collected launch."""
        flight = self._flight(launch)
        assert flight.sample_start is not None, "times before sample"
        assert flight.sample_end is not None, "times before sample"
        assert flight.copy_end is not None, "times before sample"
        return LaunchTimes(
            forward_start=flight.forward_start.time_ns(),
            forward_end=flight.forward_end.time_ns(),
            sample_start=flight.sample_start.time_ns(),
            sample_end=flight.sample_end.time_ns(),
            copy_end=flight.copy_end.time_ns(),
        )

    def _flight(self, launch: Launch) -> Flight:
        flight = self._flights[launch.slot]
        assert flight is not None, "launch has no forward"
        return flight

    def _bucket(self, num_rows: int) -> int:
        return next(bucket for bucket in self._buckets if bucket >= num_rows)

    def _stage_rows(self, slot: DecodeSlot, rows: Sequence[Row], bucket: int) -> None:
        staged = slot.staged.host
        count = len(rows)
        staged["row"][:count] = [row.sequence.row for row in rows]
        staged["position"][:count] = [row.position for row in rows]
        staged["sample_position"][:count] = [row.position + row.num_tokens for row in rows]
        staged["row"][count:bucket] = self._state.scratch_row
        staged["position"][count:bucket] = 0
        staged["sample_position"][count:bucket] = 0

    def _forward_work(self, slot: int, bucket: int) -> Callable[[], None]:
        key = (slot, bucket)
        if key not in self._forwards:
            step = DecodeStep(self._model, self._kv, self._state, self._slots[slot], bucket)
            self._forwards[key] = self._capture(step.forward)
        return self._forwards[key]

    def _sample_work(
        self, slot: int, bucket: int, sampled: bool, payload: bool
    ) -> Callable[[], None]:
        key = (slot, bucket, sampled, payload)
        if key not in self._samples:
            step = DecodeStep(self._model, self._kv, self._state, self._slots[slot], bucket)
            table_CV = self._constraints_CV
            self._samples[key] = self._capture(lambda: step.sample(table_CV, sampled, payload))
        return self._samples[key]


class _CopyBack:
    """The device-to-host copy of a slot's outputs."""

    def __init__(self, slot: DecodeSlot) -> None:
        self._slot = slot

    def __call__(self) -> None:
        slot = self._slot
        slot.tokens_host.copy_(slot.tokens_R, non_blocking=True)
        slot.payload_host.copy_(slot.payload_R2, non_blocking=True)


def _run_directly(work: Callable[[], None]) -> Callable[[], None]:
    return work
