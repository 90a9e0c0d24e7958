"""The backend of a model's CUDA kernels: every shape is a captured graph, prefills included.

A short prompt runs as rows of a decode step that share one page table. So it costs what a step
costs and has the same bits. Prompts of several sequences share such steps, and decodes join the
last one, so that none of them pays alone for reading the weights.

A step with adapters is one graph for all ranks, because the kernels read each row's rank. The image
prefixes, which adapters change too, are one graph for each of the bank's ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from legato_engine.kernels import ops
from legato_engine.kernels.accelerated import Sampler
from legato_engine.kernels.step import GROUP, MAX_TOKENS
from legato_engine.models.step_kernels import StepInputs, StepKernels
from legato_engine.runtime.decode_slot import MAX_PASSES, SHARED_PASSES
from legato_engine.runtime.encoder_runner import EncoderRunner
from legato_engine.runtime.graph_runner import Work
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
from legato_engine.runtime.resources import Resources
from legato_engine.scheduler.launch import BatchLimits, ScheduledSequence
from legato_engine.sequence import NO_PAYLOAD

_MIN_QUEUE_LENGTH = 16
"""Waiting sequences for a launch to compute several images: three images in one launch take 5 %
less time, but the first result comes later by the time of two images.
"""

_FEW_GROUPS = (1, 2)
"""Numbers of token groups that steps are laid out for, besides one group per token."""


class KernelBackend:
    """A `Backend` over `StepKernels` and, if the model has one, an `ImageEncoder`."""

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
        self.limits = BatchLimits(
            slots[0].max_prompts,
            tokens=min(SHARED_PASSES * max_tokens, model.max_context),
            sampled=max_tokens,
            images=slots[0].max_images if self.encodes_images else 1,
            min_queue_length=_MIN_QUEUE_LENGTH,
        )
        self._max_scheduled = min(MAX_PASSES * max_tokens, model.max_context)
        self._sampler = Sampler(model.vocab_size)

    def warm_up(self) -> None:
        """Run each slot, bucket, layout and kind of sampling, then all that images need."""
        drafts = self._state.drafts
        blocks = () if drafts is None else drafts.blocks
        adapters = (False,) if self._resources.bank is None else (False, True)
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
        """See `Backend.decode`."""
        drafts = self._state.drafts
        if drafts is not None:
            self._graphs.run(self._place_work, slot, bucket, drafts.block(self._slots[slot]))
        self._forward(slot, bucket, num_rows, adapted=rank > 0)

    def grow(self, slot: int) -> None:
        """See `Backend.grow`."""
        self._graphs.run(self._grow_work, slot)

    def sample(self, slot: int, bucket: int, *, sampled: bool, payload: bool) -> None:
        """Choose a token per row; the kernel reads from the row's state whether it is greedy."""
        self._graphs.run(self._sample_work, slot, bucket, payload)

    def logprobs(self, slot: int, bucket: int, *, payload: bool) -> None:
        """Compute log-probabilities with torch, over all rows of the slot whatever the bucket.

        How torch sums a row's exponentials depends on the number of rows.
        """
        self._graphs.run(self._logprobs_work, slot, payload)

    def prefill(
        self,
        slot: int,
        prompts: Sequence[ScheduledSequence],
        decodes: Sequence[ScheduledSequence],
        rank: int,
    ) -> None:
        """Enqueue images, then prompts and decodes in shared steps, the same ones at every rank."""
        buffers, compute = self._slots[slot], self._resources.compute
        encoded = [row for row in prompts if row.encodes]
        if self._encoder_runner is not None:  # first: the host prepares the rest meanwhile
            self._encoder_runner.embed(slot, encoded)
        stage_prompts(buffers, prompts, self._state.scratch_row)
        buffers.prompt.upload(compute)
        steps = [
            PrefillStep(self._resources, buffers, row, index=index)
            for index, row in enumerate(prompts)
        ]
        for row, step in zip(prompts, steps, strict=True):
            if row.work.write_adapter:
                compute.submit(step.write_adapter)
        if self._encoder_runner is not None:
            self._encoder_runner.cache(slot, encoded)
        scheduled = [
            self._after_prefix(row, step) for row, step in zip(prompts, steps, strict=True)
        ]
        self._graphs.run(self._admit_work, slot)
        num_tokens = sum(len(prompt.tokens) for prompt in scheduled) + len(decodes)
        if num_tokens > self._max_scheduled:
            assert len(prompts) + len(decodes) == 1, f"{num_tokens} tokens share a launch"
            stage_samples(buffers, prompts, self._state.scratch_row)
            buffers.staged.upload(compute)
            compute.submit(steps[0].run_long_prompt)
            return
        passes = cut_passes(decodes, scheduled, self.limits.sampled)
        self._run_passes(slot, passes, (*decodes, *prompts))

    def encode(self, slot: int, row: ScheduledSequence) -> None:
        """See `Backend.encode`."""
        assert self._encoder_runner is not None, "an encode without an image encoder"
        self._encoder_runner.encode(slot, 0, row, row.work.stop_crop)

    def _after_prefix(self, row: ScheduledSequence, step: PrefillStep) -> ScheduledPrompt:
        """Return what a prompt's steps compute, after a missing prefix that no encoder fills.

        A missing prefix that is BOS alone is computed by the steps too.
        """
        tokens, start = scheduled_tokens(row), row.position
        if row.work.compute_pages and row.sequence.inputs.image is None:
            tokens, start = [(self._resources.model.bos_token, NO_PAYLOAD), *tokens], 0
        elif row.work.compute_pages and not row.encodes:
            self._resources.compute.submit(step.run_prefix)
        return ScheduledPrompt(row.sequence.row, start, tokens)

    def _run_passes(
        self,
        slot: int,
        passes: Sequence[Sequence[ScheduledToken]],
        sampled: Sequence[ScheduledSequence],
    ) -> None:
        """Enqueue one forward per pass, each with its own staging; sample from the last one."""
        buffers, scratch = self._slots[slot], self._state.scratch_row
        adapted = any(row.sequence.adapter.key for row in sampled)
        for copy, tokens in enumerate(passes):
            bucket, is_last = bucket_for(self.buckets, len(tokens)), copy == len(passes) - 1
            if is_last:
                stage_samples(buffers, sampled, scratch, copy=copy)
            stage_pass(buffers, copy, tokens, bucket, scratch)
            buffers.staged.upload(self._resources.compute, copy)
            groups = num_groups(tokens, GROUP)
            self._forward(slot, bucket, groups, adapted=adapted, sampled=is_last)

    def _forward(
        self, slot: int, bucket: int, num_groups: int, *, adapted: bool, sampled: bool = True
    ) -> None:
        """Enqueue a step in the layout for its groups; logits are computed only if `sampled`."""
        fits = (few for few in _FEW_GROUPS if num_groups <= few < bucket <= few * GROUP)
        self._graphs.run(self._forward_work, slot, bucket, next(fits, bucket), adapted, sampled)

    def _admit_work(self, slot: int) -> Work:
        buffers, kv = self._slots[slot], self._resources.kv

        def work() -> None:
            self._state.admit(buffers)
            ops.copy_pages(kv.k_LNHSE, kv.v_LNHSE, buffers.prompt.device["copied"])

        return work

    def _grow_work(self, slot: int) -> Work:
        return lambda: self._state.grow(self._slots[slot])

    def _place_work(self, slot: int, bucket: int, block: int) -> Work:
        drafts = self._state.drafts
        assert drafts is not None, "only draft tokens are placed by the device"
        # Never one graph with the forward: its kernels read positions before the previous kernel
        # of the graph has ended.
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
                self._resources.constraints_CV,
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
        step = LogprobStep(self._resources, self._slots[slot], self.buckets[-1])
        return lambda: step(payload)


def _encoder_runner(resources: Resources) -> EncoderRunner | None:
    encoding, slots = resources.model.capabilities.images, resources.slots
    if encoding is None:
        return None
    num_images = len(slots) * slots[0].max_images
    return EncoderRunner(encoding.image_encoder(resources.device.pinned, num_images), resources)
