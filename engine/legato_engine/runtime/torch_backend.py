"""The backend of torch operations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product, starmap

from legato_engine.kernels.resident_launch import ResidentOffer
from legato_engine.runtime.backend import Needs
from legato_engine.runtime.decode_step import DecodeStep
from legato_engine.runtime.draft_state import Layout
from legato_engine.runtime.drafting_decode import DraftingDecode
from legato_engine.runtime.graph_runner import Work
from legato_engine.runtime.logprobs import LogprobStep
from legato_engine.runtime.passes import bucket_for, stage_step
from legato_engine.runtime.prefill_step import PrefillStep, stage_prompts, stage_samples
from legato_engine.runtime.preparation import Changes, preparation
from legato_engine.runtime.resources import Resources
from legato_engine.scheduler.launch import BatchLimits, ScheduledSequence
from legato_engine.speculative.block_policy import BlockPolicy


class TorchBackend:
    """For the CPU, and for GPUs without kernels for the model; prefills run eagerly."""

    def __init__(self, resources: Resources) -> None:
        self.buckets = resources.buckets
        self.limits = BatchLimits(
            resources.slots[0].max_prompts,
            tokens=resources.model.max_context,
            sampled=resources.buckets[-1],
        )
        self.encodes_images = False
        self._resources = resources
        self._slots = resources.slots
        self._graphs = resources.graphs
        self._drafting = None
        if resources.state.drafts is not None:
            layouts = [Layout(bucket, 1) for bucket in self.buckets]
            self._drafting = DraftingDecode(resources, layouts)

    def warm_up(self) -> None:
        # A CPU captures nothing: one shape loads what all need.
        on_cpu = self._resources.device.torch_device.type == "cpu"
        buckets = self.buckets[:1] if on_cpu else self.buckets
        for slot in range(len(self._slots)):
            for changes in starmap(Changes, product((False, True), repeat=2)):
                self.prepare(slot, changes)
            for bucket in buckets:
                for rank in self._resources.ranks:
                    self.decode(slot, bucket, rank, bucket)
                for sampled, payload in product((False, True), repeat=2):
                    self.sample(slot, bucket, sampled=sampled, payload=payload)
                for payload, alternatives in product((False, True), repeat=2):
                    self.logprobs(slot, bucket, payload=payload, alternatives=alternatives)

    def decode(self, slot: int, bucket: int, rank: int, num_rows: int) -> None:
        if self._drafting is not None:
            self._graphs.run(self._drafting_work, slot, rank)
        else:
            self._graphs.run(self._forward_work, slot, bucket, 1, rank)

    def resident(self, max_rows: int, policy: BlockPolicy | None = None) -> ResidentOffer | str:
        del max_rows, policy
        return "needs kernels for the model"

    def prepare(self, slot: int, changes: Changes) -> None:
        if any(changes):
            self._graphs.run(self._prepare_work, slot, *changes)

    def sample(self, slot: int, bucket: int, *, sampled: bool, payload: bool) -> None:
        self._graphs.run(self._sample_work, slot, bucket, sampled, payload)

    def logprobs(self, slot: int, bucket: int, *, payload: bool, alternatives: bool) -> None:
        self._graphs.run(self._logprobs_work, slot, bucket, payload, alternatives)

    def loop_works(self, slot: int, bucket: int, rank: int, needs: Needs) -> tuple[Work, ...]:
        graphs, payload = self._graphs, needs.payload
        if self._drafting is None:
            works = [
                graphs.captured(self._forward_work, slot, bucket, 1, rank),
                graphs.captured(self._sample_work, slot, bucket, needs.sampled, payload),
            ]
        else:
            works = [
                graphs.part(self._drafting_work, slot, rank),
                graphs.part(self._drafting_sample_work, slot, needs.sampled, payload),
            ]
        if needs.logprobs:
            works.append(graphs.captured(self._logprobs_work, slot, bucket, payload, False))
        return tuple(works)

    def prefill(
        self,
        slot: int,
        prompts: Sequence[ScheduledSequence],
        decodes: Sequence[ScheduledSequence],
        rank: int,
        changes: Changes,
    ) -> None:
        buffers, compute, state = self._slots[slot], self._resources.compute, self._resources.state
        stage_prompts(buffers, prompts, state.scratch_row)
        stage_samples(buffers, (*decodes, *prompts), state.scratch_row)
        bucket = bucket_for(self.buckets, len(decodes))
        if decodes:
            stage_step(buffers, decodes, bucket, state.scratch_row)
        buffers.staged.upload_from(buffers.prompt, compute)
        compute.submit(lambda: state.admit(buffers))
        self.prepare(slot, changes)
        if decodes:
            self.decode(slot, bucket, rank, bucket)
        first = 0
        for index, row in enumerate(prompts):
            output = len(decodes) + index
            compute.submit(
                PrefillStep(
                    self._resources, buffers, row, index=index, first_token=first, output=output
                )
            )
            first += row.num_tokens

    def encode(self, slot: int, row: ScheduledSequence) -> None:
        """Never planned: images are cropped on the host."""
        raise AssertionError("an encode was launched on a backend without an image encoder")

    def _drafting_work(self, slot: int, rank: int) -> Work:
        assert self._drafting is not None, "only draft tokens are placed by the device"
        return self._drafting.work(slot, self._forward_work, rank)

    def _forward_work(self, slot: int, bucket: int, num_groups: int, rank: int) -> Work:
        return DecodeStep(self._resources, self._slots[slot], bucket, rank).forward

    def _prepare_work(self, slot: int, grows: bool, places: bool) -> Work:
        return preparation(self._resources, slot, Changes(grows, places))

    def _sample_work(
        self, slot: int, bucket: int, sampled: bool, payload: bool, settles: bool = True
    ) -> Work:
        step = DecodeStep(self._resources, self._slots[slot], bucket)
        return lambda: step.sample(sampled, payload, settles)

    def _drafting_sample_work(self, slot: int, sampled: bool, payload: bool) -> Work:
        assert self._drafting is not None, "only draft tokens are placed by the device"
        return self._drafting.sampling(slot, self._sample_work, sampled, payload, False)

    def _logprobs_work(self, slot: int, bucket: int, payload: bool, alternatives: bool) -> Work:
        step = LogprobStep(self._resources, self._slots[slot], bucket)
        return lambda: step(payload, alternatives)
