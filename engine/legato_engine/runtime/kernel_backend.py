"""The backend of a model's CUDA kernels: every shape is a captured graph, prefills included.

A short prompt runs as rows of a decode step that share one page table, so it costs what a step
costs and has the same bits; so does an answer of any length after a preemption. Prompts share such
steps, and decodes join the last one, so that none pays alone for reading the weights.

A step with adapters is one graph for all ranks, because the kernels read each row's rank. Image
prefixes are one graph for each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from legato_engine.device.base import Event
from legato_engine.kernels import ops
from legato_engine.kernels.accelerated import SampledTokens, Sampler
from legato_engine.kernels.resident_builds import ResidentOffer
from legato_engine.kernels.step import GROUP, MAX_TOKENS
from legato_engine.models.step_kernels import StepInputs, StepKernels
from legato_engine.runtime.backend import Needs
from legato_engine.runtime.decode_slot import MAX_PASSES, SHARED_PASSES, DecodeSlot
from legato_engine.runtime.draft_state import Layout
from legato_engine.runtime.drafting_decode import DraftingDecode
from legato_engine.runtime.encoder_runner import EncoderRunner
from legato_engine.runtime.graph_runner import Work
from legato_engine.runtime.logprobs import LogprobStep
from legato_engine.runtime.long_prompts import CHUNK, LongPrompts
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
from legato_engine.runtime.resources import Resources
from legato_engine.scheduler.launch import BatchLimits, ScheduledSequence
from legato_engine.sequence import NO_PAYLOAD
from legato_engine.speculative.block_policy import BlockPolicy

_MIN_QUEUE_LENGTH = 16
"""Waiting sequences for a launch to compute several images: three in one launch take 5 % less time,
but the first result comes later by the time of two.
"""

_FEW_GROUPS = (1, 2)
"""Token groups that steps are laid out for, besides one per token."""


class KernelBackend:
    """A `Backend` over `StepKernels` and an optional `ImageEncoder`."""

    def __init__(self, kernels: StepKernels, resources: Resources) -> None:
        model, slots = resources.model, resources.slots
        max_tokens = min(resources.buckets[-1], MAX_TOKENS)
        self.buckets = resources.buckets
        self._resources = resources
        self._slots = slots
        self._state = resources.state
        self._graphs = resources.graphs
        self._kernels = kernels
        self._encoder_runner = _encoder_runner(resources)
        self.encodes_images = self._encoder_runner is not None
        cut_tokens = min(MAX_PASSES * max_tokens, model.max_context)
        chunks = model.capabilities.chunks
        self._long = None
        if chunks is not None and cut_tokens < model.max_context:
            self._long = LongPrompts(resources, chunks)
        self.limits = BatchLimits(
            slots[0].max_prompts,
            tokens=min(SHARED_PASSES * max_tokens, model.max_context),
            sampled=max_tokens,
            images=slots[0].max_images if self.encodes_images else 1,
            min_queue_length=_MIN_QUEUE_LENGTH,
            pass_tokens=max_tokens,
            cut_tokens=cut_tokens,
            long_tokens=0 if self._long is None else CHUNK,
        )
        self._sampler = Sampler(model.vocab_size)
        self._drafting = None
        if self._state.drafts is not None:
            self._drafting = DraftingDecode(resources, _layouts(self.buckets))

    def warm_up(self) -> None:
        adapters = (False,) if self._resources.bank is None else (False, True)
        for slot in range(len(self._slots)):
            self._graphs.run(self._admit_work, slot)
            self.grow(slot)
            for bucket in self.buckets:
                for adapted, groups in product(adapters, (*_FEW_GROUPS, bucket)):
                    self._forward(slot, bucket, groups, adapted=adapted, sampled=False)
                    self._forward(slot, bucket, groups, adapted=adapted)
                for payload in (False, True):
                    self.sample(slot, bucket, sampled=False, payload=payload)
            if self._drafting is not None:
                for adapted in adapters:
                    self._graphs.run(self._drafting_work, slot, adapted)
            for payload, alternatives in product((False, True), repeat=2):
                widest = self.buckets[-1]
                self.logprobs(slot, widest, payload=payload, alternatives=alternatives)
        if self._long is not None:
            self._long.warm_up()
        if self._encoder_runner is not None:
            self._encoder_runner.warm_up()

    def decode(self, slot: int, bucket: int, rank: int, num_rows: int) -> None:
        if self._drafting is not None:
            self._graphs.run(self._drafting_work, slot, rank > 0)
        else:
            self._forward(slot, bucket, num_rows, adapted=rank > 0)

    def loop_works(self, slot: int, bucket: int, rank: int, needs: Needs) -> tuple[Work, ...]:
        """The kernel reads from the row's state whether it is greedy, so `sampled` is unused."""
        graphs, payload = self._graphs, needs.payload
        if self._drafting is None:
            works = [
                graphs.captured(self._forward_work, slot, bucket, bucket, rank > 0),
                graphs.captured(self._sample_work, slot, bucket, payload),
            ]
        else:
            works = [
                graphs.part(self._drafting_work, slot, rank > 0),
                graphs.part(self._drafting_sample_work, slot, payload),
            ]
        if needs.logprobs:
            works.append(graphs.captured(self._logprobs_work, slot, payload, False))
        return tuple(works)

    def resident(self, max_rows: int, policy: BlockPolicy | None = None) -> ResidentOffer | str:
        return self._kernels.resident(max_rows, policy)

    def grow(self, slot: int) -> None:
        self._graphs.run(self._grow_work, slot)

    def sample(self, slot: int, bucket: int, *, sampled: bool, payload: bool) -> None:
        """The kernel reads from the row's state whether it is greedy."""
        self._graphs.run(self._sample_work, slot, bucket, payload)

    def logprobs(self, slot: int, bucket: int, *, payload: bool, alternatives: bool) -> None:
        """Over all rows of the slot: torch's order of summation depends on their number."""
        self._graphs.run(self._logprobs_work, slot, payload, alternatives)

    def prefill(
        self,
        slot: int,
        prompts: Sequence[ScheduledSequence],
        decodes: Sequence[ScheduledSequence],
        rank: int,
        place: Work | None = None,
    ) -> None:
        buffers, compute = self._slots[slot], self._resources.compute
        encoded = [row for row in prompts if row.encodes]
        if self._encoder_runner is not None:  # first: the host prepares the rest meanwhile
            self._encoder_runner.embed(slot, encoded)
        stage_prompts(buffers, prompts, self._state.scratch_row)
        buffers.prompt.upload(compute)
        for row in prompts:
            if row.work.write_adapter:
                compute.submit(PrefillStep(self._resources, buffers, row).write_adapter)
        if self._encoder_runner is not None:
            self._encoder_runner.cache(slot, encoded)
        scheduled = [self._after_prefix(buffers, *each) for each in enumerate(prompts)]
        self._graphs.run(self._admit_work, slot)
        if self.limits.is_long(prompts[0].sequence):
            assert len(prompts) + len(decodes) == 1, "a long prompt shares a launch"
            answer = self._run_long(slot, prompts[0], scheduled[0])
            if answer is None:
                return
            scheduled = [answer]
        passes = cut_passes(decodes, scheduled, self.limits.sampled)
        self._run_passes(slot, passes, (*decodes, *prompts), place)

    def encode(self, slot: int, row: ScheduledSequence) -> None:
        assert self._encoder_runner is not None, "an encode without an image encoder"
        self._encoder_runner.encode(slot, 0, row, row.work.stop_crop)

    def _after_prefix(
        self, buffers: DecodeSlot, index: int, row: ScheduledSequence
    ) -> ScheduledPrompt:
        """Return what a prompt's steps compute, after a missing prefix that no encoder fills.

        BOS alone is computed by the steps too.
        """
        tokens, start = scheduled_tokens(row), row.position
        if row.work.compute_pages and row.sequence.inputs.image is None:
            tokens, start = [(self._resources.model.bos_token, NO_PAYLOAD), *tokens], 0
        elif row.work.compute_pages and not row.encodes:
            step = PrefillStep(self._resources, buffers, row, index=index)
            self._resources.compute.submit(step.run_prefix)
        return ScheduledPrompt(row.sequence.row, start, tokens)

    def _run_long(
        self, slot: int, row: ScheduledSequence, scheduled: ScheduledPrompt
    ) -> ScheduledPrompt | None:
        """Run a long prompt by the matrix library; return the tokens that steps compute after it.

        After a preemption those of the answer are computed by steps however many there are, which
        gives them the bits that they had when they were decoded.
        """
        buffers, compute = self._slots[slot], self._resources.compute
        num_answer = max(0, row.position + row.num_tokens - row.sequence.prompt_length)
        num_prompt = len(scheduled.tokens) - num_answer
        if not num_answer:
            stage_samples(buffers, (row,), self._state.scratch_row)
            buffers.staged.upload(compute)
        if self._long is not None:
            given = scheduled._replace(tokens=scheduled.tokens[:num_prompt])
            self._long.run(slot, given, adapted=bool(row.sequence.adapter.key))
        else:
            alone = row._replace(num_tokens=row.num_tokens - num_answer)
            compute.submit(PrefillStep(self._resources, buffers, alone).run_long_prompt)
        if not num_answer:
            return None
        first = scheduled.start + num_prompt
        return ScheduledPrompt(scheduled.row, first, scheduled.tokens[num_prompt:])

    def _run_passes(
        self,
        slot: int,
        passes: Sequence[Sequence[ScheduledToken]],
        sampled: Sequence[ScheduledSequence],
        place: Work | None,
    ) -> None:
        buffers, scratch = self._slots[slot], self._state.scratch_row
        compute = self._resources.compute
        adapted = any(row.sequence.adapter.key for row in sampled)
        uploads: list[Event] = []
        for index, tokens in enumerate(passes):
            bucket, is_last = bucket_for(self.buckets, len(tokens)), index == len(passes) - 1
            copy = index % MAX_PASSES
            if index >= MAX_PASSES:  # only a long answer after a preemption has so many
                uploads[index - MAX_PASSES].wait()
            if is_last:
                stage_samples(buffers, sampled, scratch, copy=copy)
            stage_pass(buffers, copy, tokens, bucket, scratch)
            buffers.staged.upload(compute, copy)
            if is_last and place is not None:
                place()
            if len(passes) > MAX_PASSES:
                uploads.append(compute.record())
            groups = num_groups(tokens, GROUP)
            self._forward(slot, bucket, groups, adapted=adapted, sampled=is_last)

    def _forward(
        self, slot: int, bucket: int, num_groups: int, *, adapted: bool, sampled: bool = True
    ) -> None:
        fits = (few for few in _FEW_GROUPS if num_groups <= few < bucket <= few * GROUP)
        shape = (slot, bucket, next(fits, bucket), adapted)
        self._graphs.run(self._forward_work, *shape, *(() if sampled else (False,)))

    def _admit_work(self, slot: int) -> Work:
        buffers, kv = self._slots[slot], self._resources.kv

        def work() -> None:
            self._state.admit(buffers)
            ops.copy_pages(kv.k_LNHSE, kv.v_LNHSE, buffers.prompt.device["copied"])

        return work

    def _grow_work(self, slot: int) -> Work:
        return lambda: self._state.grow(self._slots[slot])

    def _drafting_work(self, slot: int, adapted: bool) -> Work:
        assert self._drafting is not None, "only draft tokens are placed by the device"
        # The forward begins after a conditional node: its kernels read positions before the
        # previous kernel of their graph has ended.
        return self._drafting.work(slot, self._forward_work, adapted)

    def _forward_work(
        self, slot: int, bucket: int, num_groups: int, adapted: bool, sampled: bool = True
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

    def _drafting_sample_work(self, slot: int, payload: bool) -> Work:
        assert self._drafting is not None, "only draft tokens are placed by the device"
        return self._drafting.sampling(slot, self._sample_work, payload, False)

    def _sample_work(self, slot: int, bucket: int, payload: bool, settles: bool = True) -> Work:
        buffers, state = self._slots[slot], self._state
        staged = buffers.staged.device
        sampled = SampledTokens(
            row_B=staged["sample_row"][:bucket],
            token_B=buffers.tokens_R[:bucket],
            hidden_BD=buffers.hidden_RD[:bucket],
            logits_BV=buffers.logits_RV[:bucket],
            constraints_CV=self._resources.constraints_CV,
            constraint_S=buffers.constraint.device["constraint"],
            entry_B=None if buffers.entry_R is None else buffers.entry_R[:bucket],
            payload_B2=buffers.payload_R2[:bucket],
            certainty_B2=buffers.certainty_R2[:bucket],
        )

        def work() -> None:
            self._sampler.sample(
                state,
                sampled.logits_BV,
                sampled.constraints_CV,
                sampled.constraint_S,
                sampled.row_B,
                staged["sample_position"][:bucket],
                sampled.token_B,
                entry_B=sampled.entry_B,
                overlap=False,
            )
            if payload:
                self._kernels.values(state, sampled)
            if state.drafts is not None and settles:
                state.drafts.settle(buffers, bucket, state.token_R)

        return work

    def _logprobs_work(self, slot: int, payload: bool, alternatives: bool) -> Work:
        step = LogprobStep(self._resources, self._slots[slot], self.buckets[-1])
        return lambda: step(payload, alternatives)


def _layouts(buckets: Sequence[int]) -> list[Layout]:
    """As `_forward` chooses them."""
    return [
        Layout(bucket, groups)
        for bucket in buckets
        for groups in (*(few for few in _FEW_GROUPS if few < bucket <= few * GROUP), bucket)
    ]


def _encoder_runner(resources: Resources) -> EncoderRunner | None:
    encoding, slots = resources.model.capabilities.images, resources.slots
    if encoding is None:
        return None
    num_images = len(slots) * slots[0].max_images
    return EncoderRunner(encoding.image_encoder(resources.device.pinned, num_images), resources)
