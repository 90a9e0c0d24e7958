"""Launches by a model's kernels: every shape is a captured graph, prefills included.

A short prompt runs as rows of a decode step that share one page table, so it costs what a step
costs and gives the same bits. Prompts of several sequences share such steps, and those who decode
run in the last one, so that none of them pays for the weights alone.

A pass in which a row has an adapter is a graph of its own, whatever the ranks: the kernels read
each row's. The positions of a picture, which an adapter changes too, are a graph for ranks that
double.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from legato_engine.device.base import Device
from legato_engine.kernels import ops
from legato_engine.kernels.cuda.attention import GROUP
from legato_engine.kernels.cuda.decoder import MAX_TOKENS
from legato_engine.kernels.cuda.sampling import Sampler
from legato_engine.layers.lora import AdapterBank
from legato_engine.models.model import Model
from legato_engine.models.paged_cache import KVCache
from legato_engine.models.step_kernels import StepInputs, StepKernels
from legato_engine.runtime.decode_slot import MAX_PASSES, SHARED_PASSES, DecodeSlot
from legato_engine.runtime.encoder_runner import EncoderRunner
from legato_engine.runtime.graph_runner import GraphRunner, Work
from legato_engine.runtime.logprobs import LogprobStep
from legato_engine.runtime.passes import (
    ScheduledPrompt,
    ScheduledToken,
    bucket_for,
    cut_passes,
    num_groups,
    stage_pass,
)
from legato_engine.runtime.prefill_step import (
    PrefillStep,
    scheduled_tokens,
    stage_prompts,
    stage_samples,
)
from legato_engine.runtime.row_state import RowState
from legato_engine.runtime.sampler import constraint_table
from legato_engine.scheduler.launch import BatchLimits, Row
from legato_engine.sequence import NO_PAYLOAD

_MIN_QUEUE_LENGTH = 16
"""How many wait while a launch computes several pictures: three of them spare a twentieth of their
time, and the first answer comes later by what two of them take.
"""

_FEW_GROUPS = (1, 2)
"""Numbers of groups of tokens that steps are laid out for, beside as many as there are tokens."""


class KernelBackend:
    """A `program.Program` over `StepKernels` and, for pictures, a `ImageEncoder`."""

    def __init__(
        self,
        model: Model,
        kernels: StepKernels,
        device: Device,
        kv: KVCache,
        state: RowState,
        slots: Sequence[DecodeSlot],
        bank: AdapterBank | None,
        buckets: tuple[int, ...],
        capture: Callable[[Work], Work],
    ) -> None:
        self.buckets = buckets
        most = min(buckets[-1], MAX_TOKENS)
        encoder = model.image_encoder(device.pinned, len(slots) * slots[0].max_images)
        self.encodes_images = encoder is not None
        self.limits = BatchLimits(
            slots[0].max_prompts,
            tokens=min(SHARED_PASSES * most, model.max_context),
            sampled=most,
            pictures=slots[0].max_images if self.encodes_images else 1,
            crowd=_MIN_QUEUE_LENGTH,
        )
        self._most_fed = min(MAX_PASSES * most, model.max_context)
        self._model = model
        self._kernels = kernels
        self._device = device
        self._kv = kv
        self._state = state
        self._slots = slots
        self._bank = bank
        self._graphs = GraphRunner(capture, device.compute)
        self._encoder_runner = None
        if encoder is not None:
            self._encoder_runner = EncoderRunner(
                encoder, model, device, kv, slots, bank, self._graphs
            )
        self._sampler = Sampler(model.vocab_size)
        self._constraints_CV = constraint_table(model.constraints, model.vocab_size).to(
            device.torch_device
        )

    def warm_up(self) -> None:
        """Every bucket of both slots, with and without adapters, payloads and log-probabilities;
        all that pictures need.
        """
        blocks = () if self._state.drafts is None else self._state.drafts.blocks
        adapters = (False,) if self._bank is None else (False, True)
        for slot in range(len(self._slots)):
            self._graphs.run(self._admit_work, slot)
            self.grow(slot)
            for bucket in self.buckets:
                for block in blocks:
                    self._graphs.run(self._place_work, slot, bucket, block)
                for adapted, groups in product(adapters, (*_FEW_GROUPS, bucket)):
                    self._forward(slot, bucket, groups, adapted=adapted, sampled=False)
                    self._forward(slot, bucket, groups, adapted=adapted)
                for payload in (False, True):
                    self.sample(slot, bucket, sampled=False, payload=payload)
            for payload in (False, True):
                self.logprobs(slot, self.buckets[-1], payload=payload)
        if self._encoder_runner is not None:
            self._encoder_runner.warm_up()

    def decode(self, slot: int, bucket: int, rank: int, num_rows: int) -> None:
        """See `program.Program`."""
        drafts = self._state.drafts
        if drafts is not None:
            self._graphs.run(self._place_work, slot, bucket, drafts.block(self._slots[slot]))
        self._forward(slot, bucket, num_rows, adapted=rank > 0)

    def grow(self, slot: int) -> None:
        """See `program.Program`."""
        self._graphs.run(self._grow_work, slot)

    def sample(self, slot: int, bucket: int, *, sampled: bool, payload: bool) -> None:
        """See `program.Program`; every row knows by itself whether it is greedy."""
        self._graphs.run(self._sample_work, slot, bucket, payload)

    def logprobs(self, slot: int, bucket: int, *, payload: bool) -> None:
        """See `program.Program`; by torch's operations, on the buffers that the kernels fill.

        Whatever the bucket, all rows of the slot are read: how torch adds up a row's exponentials
        depends on how many rows there are.
        """
        self._graphs.run(self._logprobs_work, slot, payload)

    def prefill(self, slot: int, prompts: Sequence[Row], decodes: Sequence[Row], rank: int) -> None:
        """See `program.Program`; passes are the same at every rank."""
        buffers, compute = self._slots[slot], self._device.compute
        encoded = [row for row in prompts if row.encodes]
        if self._encoder_runner is not None:  # first, as the host prepares the rest meanwhile
            self._encoder_runner.embed(slot, encoded)
        stage_prompts(buffers, prompts, self._state.scratch_row)
        buffers.prompt.upload(compute)
        steps = [
            PrefillStep(self._model, self._kv, buffers, self._bank, row, place=place)
            for place, row in enumerate(prompts)
        ]
        for row, step in zip(prompts, steps, strict=True):
            if row.prefix.write_adapter:
                compute.submit(step.write_adapter)
        if self._encoder_runner is not None:
            self._encoder_runner.cache(slot, encoded)
        fed = [self._behind_prefix(row, step) for row, step in zip(prompts, steps, strict=True)]
        self._graphs.run(self._admit_work, slot)
        if sum(len(prompt.tokens) for prompt in fed) + len(decodes) > self._most_fed:
            assert len(prompts) + len(decodes) == 1, "a prompt that is too long shares nothing"
            stage_samples(buffers, prompts, self._state.scratch_row)
            buffers.staged.upload(compute)
            compute.submit(steps[0].run_long_prompt)
            return
        self._run_passes(slot, cut_passes(decodes, fed, self.limits.sampled), (*decodes, *prompts))

    def encode(self, slot: int, row: Row) -> None:
        """See `program.Program`."""
        assert self._encoder_runner is not None, "a picture is left whole only for an encoder"
        self._encoder_runner.encode(slot, 0, row, row.prefix.stop_crop)

    def _behind_prefix(self, row: Row, step: PrefillStep) -> ScheduledPrompt:
        """Fill a prefix that is missing and that no encoder fills; what is fed behind it, BOS
        included if that is all.
        """
        tokens, start = scheduled_tokens(row), row.position
        if row.prefix.compute_pages and row.sequence.pixels is None:
            tokens, start = [(self._model.bos_token, NO_PAYLOAD), *tokens], 0
        elif row.prefix.compute_pages and not row.encodes:
            self._device.compute.submit(step.run_prefix)
        return ScheduledPrompt(row.sequence.row, start, tokens)

    def _run_passes(
        self, slot: int, passes: Sequence[Sequence[ScheduledToken]], sampled: Sequence[Row]
    ) -> None:
        """One forward after another, each staged apart; the last one is sampled from."""
        buffers, scratch = self._slots[slot], self._state.scratch_row
        adapted = any(row.sequence.adapter_key for row in sampled)
        for copy, tokens in enumerate(passes):
            bucket, is_last = bucket_for(self.buckets, len(tokens)), copy == len(passes) - 1
            if is_last:
                stage_samples(buffers, sampled, scratch, copy=copy)
            stage_pass(buffers, copy, tokens, bucket, scratch)
            buffers.staged.upload(self._device.compute, copy)
            groups = num_groups(tokens, GROUP)
            self._forward(slot, bucket, groups, adapted=adapted, sampled=is_last)

    def _forward(
        self, slot: int, bucket: int, num_groups: int, *, adapted: bool, sampled: bool = True
    ) -> None:
        """A step over the staged tokens, by the graph that suits so many groups of them; without
        logits unless they are `sampled` from.
        """
        fits = (few for few in _FEW_GROUPS if num_groups <= few < bucket <= few * GROUP)
        self._graphs.run(self._forward_work, slot, bucket, next(fits, bucket), adapted, sampled)

    def _admit_work(self, slot: int) -> Work:
        buffers, kv = self._slots[slot], self._kv

        def work() -> None:
            self._state.admit(buffers)
            ops.copy_pages(kv.k_LNHSE, kv.v_LNHSE, buffers.prompt.device["copied"])

        return work

    def _grow_work(self, slot: int) -> Work:
        return lambda: self._state.grow(self._slots[slot])

    def _place_work(self, slot: int, bucket: int, block: int) -> Work:
        drafts = self._state.drafts
        assert drafts is not None, "only proposed tokens are placed by the device"
        # Never one graph with the forward: its kernels read places ahead of the one in front.
        return lambda: drafts.place(self._slots[slot], bucket, self._state.page_table_RM, block)

    def _forward_work(
        self, slot: int, bucket: int, num_groups: int, adapted: bool, sampled: bool
    ) -> Work:
        buffers, state = self._slots[slot], self._state
        staged = {name: field[:bucket] for name, field in buffers.staged.device.items()}
        inputs = StepInputs(
            source_B=staged["source"],
            row_B=staged["row"],
            position_B=staged["position"],
            fresh_B=staged["fresh"],
            prompt_token_B=staged["token"],
            prompt_payload_B2=staged["payload"],
            token_R=state.token_R,
            payload_R2=state.payload_R2,
            page_table_RM=state.page_table_RM,
            adapter_slot_R=state.adapter_slot_R if adapted else None,
            num_groups=num_groups,
        )
        hidden_BD = buffers.hidden_RD[:bucket]
        logits_BV = buffers.logits_RV[:bucket] if sampled else None
        return lambda: self._kernels.forward(inputs, hidden_BD, logits_BV)

    def _sample_work(self, slot: int, bucket: int, payload: bool) -> Work:
        buffers, state = self._slots[slot], self._state
        staged = buffers.staged.device
        row_B, tokens_B = staged["sample_row"][:bucket], buffers.tokens_R[:bucket]

        def work() -> None:
            self._sampler.sample(
                state,
                buffers.logits_RV[:bucket],
                self._constraints_CV,
                buffers.constraint.device["constraint"][:bucket],
                row_B,
                staged["sample_position"][:bucket],
                tokens_B,
                overlap=False,
            )
            if payload:
                hidden_BD = buffers.hidden_RD[:bucket]
                self._kernels.payload(
                    state, hidden_BD, tokens_B, row_B, buffers.payload_R2[:bucket]
                )
            if state.drafts is not None:
                state.drafts.settle(buffers, bucket, state.token_R)

        return work

    def _logprobs_work(self, slot: int, payload: bool) -> Work:
        rows, table_CV = self.buckets[-1], self._constraints_CV
        step = LogprobStep(self._model, self._slots[slot], table_CV, rows)
        return lambda: step(payload)
