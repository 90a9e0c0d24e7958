"""Backend of CUDA kernels: decode steps and prefill passes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from legato_engine.device.base import DeviceEvent
from legato_engine.kernels.accelerated import SampledTokens, Sampler
from legato_engine.kernels.decode_loop import MegakernelOffer
from legato_engine.kernels.step import GROUP, MAX_TOKENS
from legato_engine.models.base import StepInputs, StepKernels
from legato_engine.runtime.backend import StepBackend
from legato_engine.runtime.decode_slot import MAX_PASSES, SHARED_PASSES, Resources, StepLayout
from legato_engine.runtime.encoder_runner import EncoderRunner
from legato_engine.runtime.graphs import Work
from legato_engine.runtime.prompts import CapturedPrompts
from legato_engine.runtime.staging import (
    Changes,
    Pass,
    ScheduledPrompt,
    bucket_for,
    cut_passes,
    stage_pass,
)
from legato_engine.runtime.torch_backend import (
    CHUNK,
    prefix_work,
    prompt_work,
    scheduled_tokens,
    stage_prompts,
    stage_samples,
)
from legato_engine.scheduler.batch import BatchLimits, ScheduledSequence
from legato_engine.sequence import NO_PAYLOAD
from legato_engine.speculation import BlockPolicy

FEW_GROUPS = (1, 2)
"""Token groups that steps are laid out for, plus one per token."""


def laid_out_groups(bucket: int, num_groups: int) -> int:
    """Return the fewest groups, at least `num_groups`, that steps of `bucket` tokens have."""
    fits = (few for few in FEW_GROUPS if num_groups <= few < bucket <= few * GROUP)
    return next(fits, bucket)


def _layouts(buckets: Sequence[int]) -> list[StepLayout]:
    """Return the layouts that `laid_out_groups` chooses."""
    return [
        StepLayout(bucket, groups)
        for bucket in buckets
        for groups in sorted({laid_out_groups(bucket, few) for few in (*FEW_GROUPS, bucket)})
    ]


# ---------------------------------------------------------------- kernel backend

# Every shape is a captured graph, prefills included.
#
# A short prompt runs as rows of a decode step that share one page table, so it costs what a step
# costs and has the same bits; so does an answer of any length after a preemption. Prompts share
# such steps, and decodes join the last one, so that none pays alone for reading the weights. A
# longer prompt is alone, in captured passes of one size over the matrix library.
#
# A step with adapters is one graph for all ranks, because the kernels read each row's rank. Image
# prefixes are one graph for each rank.

_MIN_QUEUE_LENGTH = 16
"""Waiting sequences for a launch to compute several images: three in one launch take 5 % less time,
but the first result comes later by the time of two.
"""


class KernelBackend(StepBackend):
    """A backend of `StepKernels` and an optional `ImageEncoder`."""

    _has_greedy_work = False  # the kernel reads from a row's state whether it is greedy

    def __init__(self, kernels: StepKernels, resources: Resources) -> None:
        model, slots = resources.model, resources.slots
        max_tokens = min(resources.buckets[-1], MAX_TOKENS)
        super().__init__(resources, _layouts(resources.buckets))
        self._kernels = kernels
        self._sampler = Sampler(model.vocab_size)
        self._encoder_runner = _encoder_runner(resources)
        self.encodes_images = self._encoder_runner is not None
        chunk_above = min(MAX_PASSES * max_tokens, model.max_context)
        self._long = None
        if model.has_prefill_chunks and chunk_above < model.max_context:
            lengths = [*range(CHUNK, model.max_context, CHUNK), model.max_context]
            self._long = CapturedPrompts(resources, (CHUNK,), lengths)
        self.limits = BatchLimits(
            slots[0].max_prompts,
            tokens=min(SHARED_PASSES * max_tokens, model.max_context),
            sampled=max_tokens,
            images=slots[0].max_images if self.encodes_images else 1,
            min_queue_length=_MIN_QUEUE_LENGTH,
            pass_tokens=max_tokens,
            chunk_above=chunk_above,
            long_chunk_tokens=0 if self._long is None else CHUNK,
        )

    def warm_up(self) -> None:
        for slot in range(len(self._slots)):
            for grows, places, admits in product((False, True), repeat=3):
                self.prepare(slot, Changes(grows, places), admits=admits)
            self._warm_up_steps(slot)
            for payload, alternatives in product((False, True), repeat=2):
                self.logprobs(slot, self.buckets[-1], payload=payload, alternatives=alternatives)
        if self._long is not None:
            self._long.warm_up()
        if self._encoder_runner is not None:
            self._encoder_runner.warm_up()

    def _warm_up_steps(self, slot: int) -> None:
        adapters = (False,) if self._resources.bank is None else (False, True)
        for bucket in self.buckets:
            for adapted, groups in product(adapters, (*FEW_GROUPS, bucket)):
                self._forward(slot, bucket, groups, adapted=adapted, sampled=False)
                self._forward(slot, bucket, groups, adapted=adapted)
            for payload in (False, True):
                self.sample(slot, bucket, sampled=False, payload=payload)
        if self._drafting is not None:
            for adapted, forces in product(adapters, (False, True)):
                self._graphs.run(self._drafting_work, slot, adapted, forces)

    def offer_megakernel(
        self, max_rows: int, policy: BlockPolicy | None = None
    ) -> MegakernelOffer | str:
        return self._kernels.offer_megakernel(max_rows, policy)

    def prefill(
        self,
        slot: int,
        prompts: Sequence[ScheduledSequence],
        decodes: Sequence[ScheduledSequence],
        rank: int,
        changes: Changes,
    ) -> None:
        buffers, compute = self._slots[slot], self._resources.compute
        encoded = [row for row in prompts if row.encodes]
        if self._encoder_runner is not None:  # first: the host prepares the rest meanwhile
            self._encoder_runner.embed(slot, encoded)
        stage_prompts(buffers, prompts, self._state.scratch_row)
        scheduled = [self._scheduled(row) for row in prompts]
        long: ScheduledPrompt | None = None
        if self.limits.is_long(prompts[0].sequence):
            assert len(prompts) + len(decodes) == 1, "a long prompt shares a launch"
            long, scheduled = _without_answer(prompts[0], scheduled[0])
        each = cut_passes(decodes, scheduled, self.limits.sampled) if scheduled else []
        buckets = [bucket_for(self.buckets, given.num_tokens) for given in each]
        passes = _Passes(each, buckets, (*decodes, *prompts))
        self._stage(slot, passes, 0)
        buffers.staged.upload_from(buffers.prompt, compute)
        for index, row in enumerate(prompts):
            self._run_prefix(slot, index, row)
        if self._encoder_runner is not None:
            self._encoder_runner.cache(slot, encoded)
        places = changes.places and passes.is_last(0)
        self.prepare(slot, changes._replace(places=places), admits=True)
        if long is not None:
            self._run_long(slot, prompts[0], long)
        self._run_passes(slot, passes, changes)

    def encode(self, slot: int, row: ScheduledSequence) -> None:
        assert self._encoder_runner is not None, "an encode without an image encoder"
        self._encoder_runner.encode(slot, 0, row, row.work.stop_piece)

    def _scheduled(self, row: ScheduledSequence) -> ScheduledPrompt:
        """Return the tokens a prompt's steps compute, plus BOS if only that is missing."""
        tokens, start = scheduled_tokens(row), row.position
        if row.work.compute_pages and row.sequence.inputs.image is None:
            tokens, start = [(self._resources.model.bos_token, NO_PAYLOAD), *tokens], 0
        return ScheduledPrompt(row.sequence.row, start, tokens)

    def _run_prefix(self, slot: int, index: int, row: ScheduledSequence) -> None:
        """Write an adapter, and a missing prefix that neither steps nor an encoder compute."""
        self._resources.write_adapter(row)
        if row.work.compute_pages and row.sequence.inputs.image is not None and not row.encodes:
            work = prefix_work(self._resources, self._slots[slot], row, index)
            self._resources.compute.submit(work)

    def _run_long(self, slot: int, row: ScheduledSequence, prompt: ScheduledPrompt) -> None:
        end = prompt.start + len(prompt.tokens)
        if self._long is not None and self._long.takes(end):
            self._long.run(slot, 0, prompt, 0, adapted=bool(row.sequence.adapter.key))
            return
        alone = row._replace(num_tokens=row.num_tokens - _num_answer(row))
        resources, buffers = self._resources, self._slots[slot]
        if row.work.compute_pages and row.sequence.inputs.image is None:
            resources.compute.submit(prefix_work(resources, buffers, row))
        resources.compute.submit(prompt_work(resources, buffers, alone))

    def _stage(self, slot: int, passes: _Passes, index: int) -> None:
        """Stage a pass, and with the last one what is sampled."""
        buffers, scratch, copy = self._slots[slot], self._state.scratch_row, index % MAX_PASSES
        if passes.is_last(index):
            stage_samples(buffers, passes.sampled, scratch, copy=copy)
        if index < len(passes.each):
            stage_pass(buffers, copy, passes.each[index], passes.buckets[index], scratch)

    def _run_passes(self, slot: int, passes: _Passes, changes: Changes) -> None:
        """Run the passes; passes after the first are staged here."""
        buffers, compute = self._slots[slot], self._resources.compute
        adapted = any(row.sequence.adapter.key for row in passes.sampled)
        uploads: list[DeviceEvent] = []
        for index, (given, bucket) in enumerate(zip(passes.each, passes.buckets, strict=True)):
            is_last = passes.is_last(index)
            if index >= MAX_PASSES:  # only a long answer after a preemption has that many
                uploads[index - MAX_PASSES].wait()
            if index:
                self._stage(slot, passes, index)
                buffers.staged.upload(compute, index % MAX_PASSES)
                if is_last:
                    self.prepare(slot, Changes(places=changes.places))
            if len(passes.each) > MAX_PASSES:
                uploads.append(compute.record())
            groups = given.num_groups(GROUP)
            self._forward(slot, bucket, groups, adapted=adapted, sampled=is_last)

    def _forward(
        self, slot: int, bucket: int, num_groups: int, *, adapted: bool, sampled: bool = True
    ) -> None:
        shape = self._forward_shape(bucket, num_groups, int(adapted))
        self._graphs.run(self._forward_work, slot, *shape, *(() if sampled else (False,)))

    def _forward_shape(self, bucket: int, num_tokens: int, rank: int) -> tuple[int, int, int]:
        return bucket, laid_out_groups(bucket, num_tokens), int(rank > 0)

    def _logprob_rows(self, bucket: int) -> int:
        """Return the whole slot's: torch's order of summation depends on their number."""
        return self.buckets[-1]

    def _forward_work(
        self, slot: int, bucket: int, num_groups: int, rank: int, sampled: bool = True
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
            adapter_slot_R=state.adapter_slot_R if rank else None,
            num_groups=num_groups,
        )
        hidden_BD = buffers.hidden_RD[:bucket]
        logits_BV = buffers.logits_RV[:bucket] if sampled else None
        return lambda: self._kernels.forward(inputs, hidden_BD, logits_BV)

    def _sample_work(
        self, slot: int, bucket: int, sampled: bool, payload: bool, settles: bool = True
    ) -> Work:
        buffers, state = self._slots[slot], self._state
        staged = buffers.staged.device
        tokens = SampledTokens(
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
                tokens.logits_BV,
                tokens.constraints_CV,
                tokens.constraint_S,
                tokens.row_B,
                staged["sample_position"][:bucket],
                tokens.token_B,
                entry_B=tokens.entry_B,
            )
            if payload:
                self._kernels.values(state, tokens)
            if state.drafts is not None and settles:
                state.drafts.settle(buffers, bucket, state.token_R)

        return work


class _Passes(NamedTuple):
    """All of a launch; none, if the matrix library runs it whole."""

    each: Sequence[Pass]
    buckets: Sequence[int]
    sampled: Sequence[ScheduledSequence]

    def is_last(self, index: int) -> bool:
        """Return whether the launch is sampled after this pass."""
        return index >= len(self.each) - 1


def _num_answer(row: ScheduledSequence) -> int:
    """Tokens of its answer before a preemption."""
    return max(0, row.position + row.num_tokens - row.sequence.prompt_length)


def _without_answer(
    row: ScheduledSequence, scheduled: ScheduledPrompt
) -> tuple[ScheduledPrompt, list[ScheduledPrompt]]:
    """Split a resumed prompt into the prompt and its answer before the preemption.

    The answer is computed by steps, however long it is, which gives it the bits of its first
    decode.
    """
    end = len(scheduled.tokens)
    num_prompt = end - _num_answer(row)
    answer = [scheduled.part(num_prompt, end)] if num_prompt < end else []
    return scheduled.part(0, num_prompt), answer


def _encoder_runner(resources: Resources) -> EncoderRunner | None:
    num_images = len(resources.slots) * resources.slots[0].max_images
    encoder = resources.model.image_encoder(resources.device.pinned, num_images)
    return None if encoder is None else EncoderRunner(encoder, resources)
