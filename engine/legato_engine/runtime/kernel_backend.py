"""The backend of a model's CUDA kernels: captured graphs, prefills included.

Only long prompts of models with experts, and writes of adapters, are not captured.

A short prompt runs as rows of a decode step that share one page table, so it costs what a step
costs and has the same bits; so does an answer of any length after a preemption. Prompts share such
steps, and decodes join the last one, so that none pays alone for reading the weights.

A step with adapters is one graph for all ranks, because the kernels read each row's rank. Image
prefixes are one graph for each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from legato_engine.device.base import Event
from legato_engine.kernels.resident_launch import ResidentOffer
from legato_engine.kernels.step import GROUP, MAX_TOKENS
from legato_engine.models.step_kernels import StepKernels
from legato_engine.runtime.backend import Needs
from legato_engine.runtime.decode_slot import MAX_PASSES, SHARED_PASSES
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
from legato_engine.runtime.preparation import Changes
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
        for slot in range(len(self._slots)):
            for grows, places, admits in product((False, True), repeat=3):
                self._prepare(slot, Changes(grows, places), admits=admits)
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
        if self._state.drafts is not None:
            for adapted in adapters:
                self._graphs.run(self._works.drafting, slot, adapted)

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

    def prepare(self, slot: int, changes: Changes) -> None:
        self._prepare(slot, changes, admits=False)

    def _prepare(self, slot: int, changes: Changes, *, admits: bool) -> None:
        if any(changes) or admits:
            self._graphs.run(self._works.prepare, slot, *changes, admits)

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
        self._prepare(slot, changes._replace(places=places), admits=True)
        if long is not None:
            self._run_long(slot, prompts[0], long)
        self._run_passes(slot, passes, changes)

    def encode(self, slot: int, row: ScheduledSequence) -> None:
        assert self._encoder_runner is not None, "an encode without an image encoder"
        self._encoder_runner.encode(slot, 0, row, row.work.stop_crop)

    def _scheduled(self, row: ScheduledSequence) -> ScheduledPrompt:
        """What a prompt's steps compute: BOS too, where it alone is missing of the prefix."""
        tokens, start = scheduled_tokens(row), row.position
        if row.work.compute_pages and row.sequence.inputs.image is None:
            tokens, start = [(self._resources.model.bos_token, NO_PAYLOAD), *tokens], 0
        return ScheduledPrompt(row.sequence.row, start, tokens)

    def _run_prefix(self, slot: int, index: int, row: ScheduledSequence) -> None:
        """Write an adapter, and a missing prefix that neither steps nor an encoder compute."""
        compute, buffers = self._resources.compute, self._slots[slot]
        if row.work.write_adapter:
            compute.submit(PrefillStep(self._resources, buffers, row).write_adapter)
        if row.work.compute_pages and row.sequence.inputs.image is not None and not row.encodes:
            step = PrefillStep(self._resources, buffers, row, index=index)
            compute.submit(step.run_prefix)

    def _run_long(self, slot: int, row: ScheduledSequence, prompt: ScheduledPrompt) -> None:
        """Run a long prompt by the matrix library."""
        if self._long is not None:
            self._long.run(slot, prompt, adapted=bool(row.sequence.adapter.key))
            return
        alone = row._replace(num_tokens=row.num_tokens - _num_answer(row))
        step = PrefillStep(self._resources, self._slots[slot], alone)
        self._resources.compute.submit(step.run_long_prompt)

    def _stage(self, slot: int, passes: _Passes, index: int) -> None:
        """Stage a pass, and with the last one what is sampled."""
        buffers, scratch, copy = self._slots[slot], self._state.scratch_row, index % MAX_PASSES
        if passes.is_last(index):
            stage_samples(buffers, passes.sampled, scratch, copy=copy)
        if index < len(passes.each):
            stage_pass(buffers, copy, passes.each[index], passes.buckets[index], scratch)

    def _run_passes(self, slot: int, passes: _Passes, changes: Changes) -> None:
        """Those after the first one are not staged yet."""
        buffers, compute = self._slots[slot], self._resources.compute
        adapted = any(row.sequence.adapter.key for row in passes.sampled)
        uploads: list[Event] = []
        for index, (given, bucket) in enumerate(zip(passes.each, passes.buckets, strict=True)):
            is_last = passes.is_last(index)
            if index >= MAX_PASSES:  # only a long answer after a preemption has so many
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
        shape = (slot, bucket, laid_out_groups(bucket, num_groups), adapted)
        self._graphs.run(self._works.forward, *shape, *(() if sampled else (False,)))


class _Passes(NamedTuple):
    """All of a launch; none, if the matrix library runs it whole."""

    each: Sequence[Pass]
    buckets: Sequence[int]
    sampled: Sequence[ScheduledSequence]

    def is_last(self, index: int) -> bool:
        """Whether the launch is sampled after it."""
        return index >= len(self.each) - 1


def _num_answer(row: ScheduledSequence) -> int:
    """Tokens of its answer before a preemption."""
    return max(0, row.position + row.num_tokens - row.sequence.prompt_length)


def _without_answer(
    row: ScheduledSequence, scheduled: ScheduledPrompt
) -> tuple[ScheduledPrompt, list[ScheduledPrompt]]:
    """A prompt, and its answer before a preemption, which is computed by steps however long it is:
    that gives it the bits that it had when it was decoded.
    """
    end = len(scheduled.tokens)
    num_prompt = end - _num_answer(row)
    answer = [scheduled.part(num_prompt, end)] if num_prompt < end else []
    return scheduled.part(0, num_prompt), answer


def _encoder_runner(resources: Resources) -> EncoderRunner | None:
    encoding, slots = resources.model.capabilities.images, resources.slots
    if encoding is None:
        return None
    num_images = len(slots) * slots[0].max_images
    return EncoderRunner(encoding.image_encoder(resources.device.pinned, num_images), resources)
