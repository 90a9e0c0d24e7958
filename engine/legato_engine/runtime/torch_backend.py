"""Launches by a model's own torch operations: the CPU, and GPUs without kernels for the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from legato_engine.device.base import Device
from legato_engine.layers.lora import AdapterBank
from legato_engine.models.model import Model
from legato_engine.models.paged_cache import KVCache
from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.decode_step import DecodeStep
from legato_engine.runtime.logprobs import LogprobStep
from legato_engine.runtime.passes import bucket_for, stage_step
from legato_engine.runtime.prefill_step import PrefillStep, stage_prompts, stage_samples
from legato_engine.runtime.row_state import RowState
from legato_engine.runtime.sampler import constraint_table
from legato_engine.scheduler.launch import BatchLimits, Row

Capture = Callable[[Callable[[], None]], Callable[[], None]]


class TorchBackend:
    """A `program.Program`; decode steps are captured where the device can, prefills run eagerly."""

    def __init__(
        self,
        model: Model,
        device: Device,
        kv: KVCache,
        state: RowState,
        slots: Sequence[DecodeSlot],
        bank: AdapterBank | None,
        buckets: tuple[int, ...],
        capture: Capture,
    ) -> None:
        self.buckets = buckets
        self.limits = BatchLimits(
            slots[0].max_prompts, tokens=model.max_context, sampled=buckets[-1]
        )
        self.encodes_images = False
        self._model = model
        self._device = device
        self._kv = kv
        self._state = state
        self._slots = slots
        self._bank = bank
        self._ranks = (0, *bank.ranks) if bank is not None else (0,)
        self._capture = capture
        self._constraints_CV = constraint_table(model.constraints, model.vocab_size).to(
            device.torch_device
        )
        self._forwards: dict[tuple[int, int, int, int], Callable[[], None]] = {}
        self._grows: dict[int, Callable[[], None]] = {}
        self._samples: dict[tuple[int, int, bool, bool], Callable[[], None]] = {}
        self._logprobs: dict[tuple[int, int, bool], Callable[[], None]] = {}

    def warm_up(self) -> None:
        """Every bucket of both slots and every rank, with and without sampling, payloads and
        log-probabilities.
        """
        blocks = (0,) if self._state.drafts is None else self._state.drafts.blocks
        for slot in range(len(self._slots)):
            self.grow(slot)
            for bucket in self.buckets:
                for rank, block in product(self._ranks, blocks):
                    self._slots[slot].num_drafts = block
                    self.decode(slot, bucket, rank, bucket)
                for sampled in (False, True):
                    for payload in (False, True):
                        self.sample(slot, bucket, sampled=sampled, payload=payload)
                for payload in (False, True):
                    self.logprobs(slot, bucket, payload=payload)

    def decode(self, slot: int, bucket: int, rank: int, num_rows: int) -> None:
        """See `program.Program`."""
        drafts = self._state.drafts
        block = drafts.block(self._slots[slot]) if drafts is not None else 0
        key = (slot, bucket, rank, block)
        if key not in self._forwards:
            self._forwards[key] = self._capture(self._step(*key).forward)
        self._device.compute.submit(self._forwards[key])

    def grow(self, slot: int) -> None:
        """See `program.Program`."""
        if slot not in self._grows:
            buffers = self._slots[slot]
            self._grows[slot] = self._capture(lambda: self._state.grow(buffers))
        self._device.compute.submit(self._grows[slot])

    def sample(self, slot: int, bucket: int, *, sampled: bool, payload: bool) -> None:
        """See `program.Program`."""
        key = (slot, bucket, sampled, payload)
        if key not in self._samples:
            step, table_CV = self._step(slot, bucket), self._constraints_CV
            self._samples[key] = self._capture(lambda: step.sample(table_CV, sampled, payload))
        self._device.compute.submit(self._samples[key])

    def logprobs(self, slot: int, bucket: int, *, payload: bool) -> None:
        """See `program.Program`."""
        key = (slot, bucket, payload)
        if key not in self._logprobs:
            step = LogprobStep(self._model, self._slots[slot], self._constraints_CV, bucket)
            self._logprobs[key] = self._capture(lambda: step(payload))
        self._device.compute.submit(self._logprobs[key])

    def prefill(self, slot: int, prompts: Sequence[Row], decodes: Sequence[Row], rank: int) -> None:
        """See `program.Program`; a decode step, then one prompt after another."""
        buffers, compute, state = self._slots[slot], self._device.compute, self._state
        stage_prompts(buffers, prompts, state.scratch_row)
        stage_samples(buffers, (*decodes, *prompts), state.scratch_row)
        bucket = bucket_for(self.buckets, len(decodes))
        if decodes:
            stage_step(buffers, decodes, bucket, state.scratch_row)
        buffers.prompt.upload(compute)
        buffers.staged.upload(compute)
        compute.submit(lambda: state.admit(buffers))
        if decodes:
            self.decode(slot, bucket, rank, bucket)
        first = 0
        for place, row in enumerate(prompts):
            sampled = len(decodes) + place
            where = {"place": place, "first": first, "sampled": sampled}
            step = PrefillStep(self._model, self._kv, buffers, self._bank, row, **where)
            compute.submit(step)
            first += row.num_tokens

    def encode(self, slot: int, row: Row) -> None:
        """Never planned: pictures are split only for a program that has an encoder."""
        raise AssertionError("no picture is encoded apart from its prefill here")

    def _step(self, slot: int, bucket: int, rank: int = 0, block: int = 0) -> DecodeStep:
        buffers, bank = self._slots[slot], self._bank
        return DecodeStep(self._model, self._kv, self._state, buffers, bucket, bank, rank, block)
