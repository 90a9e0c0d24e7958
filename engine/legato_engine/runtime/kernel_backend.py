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
from legato_engine.kernels.resident_launch import ResidentOffer
from legato_engine.kernels.step import GROUP, MAX_TOKENS
from legato_engine.models.step_kernels import StepKernels
from legato_engine.runtime.backend import Needs
from legato_engine.runtime.decode_slot import MAX_PASSES, SHARED_PASSES, DecodeSlot
from legato_engine.runtime.encoder_runner import EncoderRunner
from legato_engine.runtime.graph_runner import Work
from legato_engine.runtime.long_prompts import CHUNK, LongPrompts
from legato_engine.runtime.passes import (
    Pass,
    ScheduledPrompt,
    bucket_for,
    cut_passes,
    stage_pass,
)
from legato_engine.runtime.prefill_step import (
    PrefillStep,
    scheduled_tokens,
    stage_prompts,
    stage_samples,
)
from legato_engine.runtime.resources import Resources
from legato_engine.runtime.step_works import FEW_GROUPS, StepWorks, laid_out_groups
from legato_engine.scheduler.launch import BatchLimits, ScheduledSequence
from legato_engine.sequence import NO_PAYLOAD
from legato_engine.speculative.block_policy import BlockPolicy

_MIN_QUEUE_LENGTH = 16
"""Waiting sequences for a launch to compute several images: three in one launch take 5 % less time,
but the first result comes later by the time of two.
"""


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
        self._works = StepWorks(kernels, resources)

    def warm_up(self) -> None:
        adapters = (False,) if self._resources.bank is None else (False, True)
        for slot in range(len(self._slots)):
            self._graphs.run(self._works.admit, slot)
            self.grow(slot)
            for bucket in self.buckets:
                for adapted, groups in product(adapters, (*FEW_GROUPS, bucket)):
                    self._forward(slot, bucket, groups, adapted=adapted, sampled=False)
                    self._forward(slot, bucket, groups, adapted=adapted)
                for payload in (False, True):
                    self.sample(slot, bucket, sampled=False, payload=payload)
            if self._state.drafts is not None:
                for adapted in adapters:
                    self._graphs.run(self._works.drafting, slot, adapted)
            for payload, alternatives in product((False, True), repeat=2):
                widest = self.buckets[-1]
                self.logprobs(slot, widest, payload=payload, alternatives=alternatives)
        if self._long is not None:
            self._long.warm_up()
        if self._encoder_runner is not None:
            self._encoder_runner.warm_up()

    def decode(self, slot: int, bucket: int, rank: int, num_rows: int) -> None:
        if self._state.drafts is not None:
            self._graphs.run(self._works.drafting, slot, rank > 0)
        else:
            self._forward(slot, bucket, num_rows, adapted=rank > 0)

    def loop_works(self, slot: int, bucket: int, rank: int, needs: Needs) -> tuple[Work, ...]:
        """The kernel reads from the row's state whether it is greedy, so `sampled` is unused."""
        graphs, payload = self._graphs, needs.payload
        if self._state.drafts is None:
            works = [
                graphs.captured(self._works.forward, slot, bucket, bucket, rank > 0),
                graphs.captured(self._works.sample, slot, bucket, payload),
            ]
        else:
            works = [
                graphs.part(self._works.drafting, slot, rank > 0),
                graphs.part(self._works.drafting_sample, slot, payload),
            ]
        if needs.logprobs:
            works.append(graphs.captured(self._works.logprobs, slot, payload, False))
        return tuple(works)

    def resident(self, max_rows: int, policy: BlockPolicy | None = None) -> ResidentOffer | str:
        return self._kernels.resident(max_rows, policy)

    def grow(self, slot: int) -> None:
        self._graphs.run(self._works.grow, slot)

    def sample(self, slot: int, bucket: int, *, sampled: bool, payload: bool) -> None:
        """The kernel reads from the row's state whether it is greedy."""
        self._graphs.run(self._works.sample, slot, bucket, payload)

    def logprobs(self, slot: int, bucket: int, *, payload: bool, alternatives: bool) -> None:
        """Over all rows of the slot: torch's order of summation depends on their number."""
        self._graphs.run(self._works.logprobs, slot, payload, alternatives)

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
        self._graphs.run(self._works.admit, slot)
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
            given = scheduled.part(0, num_prompt)
            self._long.run(slot, given, adapted=bool(row.sequence.adapter.key))
        else:
            alone = row._replace(num_tokens=row.num_tokens - num_answer)
            compute.submit(PrefillStep(self._resources, buffers, alone).run_long_prompt)
        if not num_answer:
            return None
        return scheduled.part(num_prompt, len(scheduled.tokens))

    def _run_passes(
        self,
        slot: int,
        passes: Sequence[Pass],
        sampled: Sequence[ScheduledSequence],
        place: Work | None,
    ) -> None:
        buffers, scratch = self._slots[slot], self._state.scratch_row
        compute = self._resources.compute
        adapted = any(row.sequence.adapter.key for row in sampled)
        uploads: list[Event] = []
        for index, each in enumerate(passes):
            bucket, is_last = bucket_for(self.buckets, each.num_tokens), index == len(passes) - 1
            copy = index % MAX_PASSES
            if index >= MAX_PASSES:  # only a long answer after a preemption has so many
                uploads[index - MAX_PASSES].wait()
            if is_last:
                stage_samples(buffers, sampled, scratch, copy=copy)
            stage_pass(buffers, copy, each, bucket, scratch)
            buffers.staged.upload(compute, copy)
            if is_last and place is not None:
                place()
            if len(passes) > MAX_PASSES:
                uploads.append(compute.record())
            groups = each.num_groups(GROUP)
            self._forward(slot, bucket, groups, adapted=adapted, sampled=is_last)

    def _forward(
        self, slot: int, bucket: int, num_groups: int, *, adapted: bool, sampled: bool = True
    ) -> None:
        shape = (slot, bucket, laid_out_groups(bucket, num_groups), adapted)
        self._graphs.run(self._works.forward, *shape, *(() if sampled else (False,)))


def _encoder_runner(resources: Resources) -> EncoderRunner | None:
    encoding, slots = resources.model.capabilities.images, resources.slots
    if encoding is None:
        return None
    num_images = len(slots) * slots[0].max_images
    return EncoderRunner(encoding.image_encoder(resources.device.pinned, num_images), resources)
