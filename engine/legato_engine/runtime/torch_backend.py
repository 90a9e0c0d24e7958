"""Backend of torch operations.

They read and write only fixed buffers, so they can be captured.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Sequence as Many
from itertools import product

import torch

from legato_engine.kernels.decode_loop import MegakernelOffer
from legato_engine.kernels.proposer import UNKNOWN
from legato_engine.models.base import Model
from legato_engine.models.paged_attention import DecodeBatch, PrefillSpan, VisualRows
from legato_engine.runtime.backend import Needs
from legato_engine.runtime.decode_slot import DecodeSlot, Resources, StepLayout
from legato_engine.runtime.descriptors import DESCRIPTOR, NO_DRAFTS, initial_descriptor
from legato_engine.runtime.drafting import DraftingDecode
from legato_engine.runtime.graphs import Work
from legato_engine.runtime.prompts import CapturedPrompts
from legato_engine.runtime.sampler import LogprobStep, greedy, sample
from legato_engine.runtime.staging import (
    Changes,
    ScheduledPrompt,
    bucket_for,
    preparation,
    stage_step,
    stage_tokens,
)
from legato_engine.scheduler.batch import BatchLimits, ScheduledSequence
from legato_engine.sequence import Sequence, TokenKey, VisualInputs
from legato_engine.speculation import INITIAL_RATE, BlockPolicy
from legato_engine.types import Request


class DecodeStep:
    """A step of one batch size over one slot's buffers.

    `rank` 0 reads no adapters.
    """

    def __init__(self, resources: Resources, slot: DecodeSlot, batch: int, rank: int = 0) -> None:
        self._resources = resources
        self._model = resources.model
        self._slot = slot
        self._batch = batch
        self._rank = rank

    def forward(self) -> None:
        resources, slot, batch = self._resources, self._slot, self._batch
        model, state = resources.model, resources.state
        row_B = slot.staged.device["row"][:batch]
        source_B = slot.staged.device["source"][:batch]
        staged_B = slot.staged.device["token"][:batch]
        token_B = torch.where(source_B < 0, staged_B, state.token_R[row_B])
        x_BD = model.embed(token_B, state.payload_R2[row_B])
        decode_batch = DecodeBatch(
            slot.staged.device["position"][:batch],
            state.page_table_RM[row_B],
            resources.adapters(state.adapter_slot_R[row_B], self._rank),
            None if state.rope_offset_R is None else state.rope_offset_R[row_B],
        )
        hidden_BD = model.decode(x_BD, decode_batch, resources.kv)
        slot.hidden_RD[:batch].copy_(hidden_BD)
        slot.logits_RV[:batch].copy_(model.logits(hidden_BD))

    def sample(self, sampled: bool, payload: bool, settles: bool = True) -> None:
        """Choose tokens and payloads, and keep both for the next forward.

        A row whose logits are not finite returns token -1 and feeds token 0. Of several tokens of
        one row, `DraftState.settle` finds the newest, here if this `settles`; draft tokens have no
        payload.
        """
        resources, slot, batch = self._resources, self._slot, self._batch
        state = resources.state
        row_B = slot.staged.device["sample_row"][:batch]
        raw_BV = slot.logits_RV[:batch]
        logits_BV = raw_BV + resources.constraints_CV[slot.constraints(batch)]
        if sampled:
            token_B = sample(
                logits_BV,
                state.temperature_R[row_B],
                state.top_p_R[row_B],
                state.top_k_R[row_B],
                state.seed_R[row_B],
                slot.staged.device["sample_position"][:batch],
            )
        else:
            token_B = greedy(logits_BV)
        finite_B = torch.isfinite(raw_BV.sum(-1))
        token_B = torch.where(finite_B, token_B, 0)
        state.token_R[row_B] = token_B
        slot.tokens_R[:batch].copy_(torch.where(finite_B, token_B, -1))
        if payload and self._model.has_value_heads:
            hidden_BD = slot.hidden_RD[:batch]
            payload_B2, certainty_B2 = self._model.values(hidden_BD, token_B, logits_BV)
            state.payload_R2[row_B] = payload_B2
            slot.payload_R2[:batch].copy_(payload_B2)
            slot.certainty_R2[:batch].copy_(certainty_B2)
        if state.drafts is not None and settles:
            state.drafts.settle(slot, batch, state.token_R)


# ---------------------------------------------------------------- prefill step

# Staging and torch operations of a prefill.


def scheduled_tokens(row: ScheduledSequence) -> list[TokenKey]:
    """Return the tokens after the prefix, those of a resumed answer included."""
    first = row.position - row.sequence.prefix_length
    return row.sequence.tokens[first : first + row.num_tokens]


def stage_prompts(slot: DecodeSlot, rows: Many[ScheduledSequence], scratch_row: int) -> None:
    staged, first = slot.prompt.host, 0
    staged["row"].fill(scratch_row)
    staged["pages"].fill(0)  # the scratch page
    staged["adapter_slot"].fill(0)  # no adapter
    staged["copied"].fill(0)
    for index, row in enumerate(rows):
        sequence = row.sequence
        first = stage_tokens(staged, first, scheduled_tokens(row))
        pages = row.work.compute_pages
        staged["prefix_pages"][index, : len(pages)] = pages
        staged["pages"][index, : len(sequence.pages.ids)] = sequence.pages.ids
        if row.work.copy_tail is not None:
            staged["copied"][index] = row.work.copy_tail
        staged["adapter_slot"][index] = sequence.adapter.slot
        sampling = sequence.task.sampling
        staged["row"][index] = sequence.row
        staged["seed"][index] = (sampling.seed or 0) & ((1 << 63) - 1)
        staged["top_k"][index] = sampling.top_k or 0
        staged["temperature"][index] = sampling.temperature or 0.0
        staged["top_p"][index] = 1.0 if sampling.top_p is None else sampling.top_p
        visual = sequence.inputs.visual
        staged["rope_offset"][index] = 0 if visual is None else visual.prompt.rope_offset
        if slot.speculates:
            sequence.pages.num_staged = len(sequence.pages.ids)
            _stage_history(slot, index, sequence)


def stage_samples(
    slot: DecodeSlot, rows: Many[ScheduledSequence], scratch_row: int, *, copy: int = 0
) -> None:
    staged, count = slot.staged.hosts[copy], len(rows)
    staged["sample_row"].fill(scratch_row)
    staged["sample_row"][:count] = [row.sequence.row for row in rows]
    staged["sample_position"][:count] = [row.position + row.num_tokens for row in rows]
    if slot.speculates:
        staged["scheduled_row"].fill(scratch_row)
        staged["scheduled_row"][:count] = staged["sample_row"][:count]
        staged["room"].fill(NO_DRAFTS)
        staged["start"][:count] = staged["scheduled"][:count] = range(count)
        staged["fed"][:count] = 1


def _stage_history(slot: DecodeSlot, index: int, sequence: Sequence) -> None:
    """Stage all known tokens, the last position to feed, and the descriptor."""
    words = slot.prompt.host["descriptor"][index]
    words.view(DESCRIPTOR)[0] = initial_descriptor(sequence, INITIAL_RATE)
    history = slot.prompt.host["history"][index]
    history.fill(UNKNOWN)
    history[sequence.prefix_length : sequence.length] = [token for token, _ in sequence.tokens]
    slot.prompt.host["limit"][index] = sequence.max_length - 1


CHUNK = 512
"""Tokens of a long prompt's chunk, and those of images that are encoded between two decodes."""

CPU_CHUNK = 256
"""The same on a CPU, where decodes wait longer for it; fewer rows take more time each."""


class ImageFeatures:
    """Features of images between prompts' tokens; belongs to the compute stream.

    A sequence has those of its next chunk (`VisualInputs.features`), finished or in the making, and
    they end with its inputs. The latest, up to `max_bytes`, are kept for later prompts. Tenants
    share none: times would reveal what another one sent. A request that lets no image be cached
    shares none either.
    """

    def __init__(self, model: Model, max_bytes: int = 0) -> None:
        self._model = model
        self._max_bytes = max_bytes
        self._kept: dict[tuple[str, str], torch.Tensor] = {}
        """By tenant and key of the image, the oldest first."""

    @staticmethod
    def reserved_bytes(model: Model, max_bytes: int) -> int:
        """Return the most that are in memory at a time.

        Beside those kept, a chunk reads whole images between one that begins before it and one that
        ends after it, and a copy of its own rows. A short prompt may pass between two chunks.
        """
        if not model.has_visual_prompts:
            return 0
        num_tokens = 2 * model.max_image_tokens + 3 * CHUNK
        return max_bytes + num_tokens * model.image_token_bytes

    def encode(self, visual: VisualInputs, pieces: range, request: Request) -> None:
        for piece in pieces:
            self._run_piece(visual, piece // visual.prompt.pieces_per_image, request)

    def rows(
        self, visual: VisualInputs, start: int, stop: int, device: torch.device, request: Request
    ) -> VisualRows:
        """Gather the images of positions `[start, stop)`; encode what is missing of them.

        The sequence gives up an image with its last position.
        """
        prompt, rows, features = visual.prompt, [], []
        for span in prompt.spans:
            first, last = max(span.start, start), min(span.stop, stop)
            if first < last:
                rows.append(torch.arange(first - start, last - start))
                while (encoded_NKD := self._run_piece(visual, span.index, request)) is None:
                    pass
                features.append(encoded_NKD[first - span.start : last - span.start])
                if last == span.stop:
                    del visual.features[span.index]
        first_later = max(start, prompt.rope_3P.shape[1])
        later = torch.arange(first_later, max(first_later, stop)) + prompt.rope_offset
        rope_3T = torch.from_numpy(prompt.rope_3P[:, start:stop])
        return VisualRows(
            torch.cat((rope_3T, later.expand(3, -1)), dim=1).to(device),
            torch.cat(rows).to(device)
            if rows
            else torch.zeros(0, dtype=torch.int64, device=device),
            torch.cat(features) if features else torch.zeros(0, 1, self._model.width),
        )

    def _run_piece(self, visual: VisualInputs, index: int, request: Request) -> torch.Tensor | None:
        """Run an image's next piece, unless it is encoded; return the features after the last."""
        image, found = visual.images[index], visual.features.get(index)
        if found is None:
            found = self._kept.get((request.tenant, image.key)) if request.cache_image else None
            if found is not None:
                self._keep(request.tenant, image.key, found)
            else:
                found = self._model.encode_image(image)
            visual.features[index] = found
        if isinstance(found, torch.Tensor):
            return found
        try:
            next(found)
        except StopIteration as end:
            features_NKD: torch.Tensor = end.value
        else:
            return None
        visual.features[index] = features_NKD
        if request.cache_image:
            self._keep(request.tenant, image.key, features_NKD)
        return features_NKD

    def _keep(self, tenant: str, key: str, features_NKD: torch.Tensor) -> None:
        """Make these the latest, and forget the oldest ones beyond the limit."""
        self._kept.pop((tenant, key), None)
        self._kept[tenant, key] = features_NKD
        while sum(each.nbytes for each in self._kept.values()) > self._max_bytes:
            del self._kept[next(iter(self._kept))]


class PrefillStep:
    """The torch operations of one sequence's prefill over one slot's buffers.

    The sequence is prompt `index` of its launch, its tokens start at staged token `first_token`,
    and its last position's outputs become row `output` of the slot. Prefix and private tokens are
    always two passes, so that a cached prefix and a fresh one have the same bits. The sequence is
    read only here, on the scheduler's thread.
    """

    def __init__(
        self,
        resources: Resources,
        slot: DecodeSlot,
        row: ScheduledSequence,
        *,
        index: int = 0,
        first_token: int = 0,
        output: int = 0,
        features: ImageFeatures | None = None,
    ) -> None:
        self._resources = resources
        self._model = resources.model
        self._kv = resources.kv
        self._slot = slot
        self._index = index
        self._tokens = slice(first_token, first_token + row.num_tokens)
        self._output = slice(output, output + 1)
        self._pixels = row.sequence.inputs.image
        self._visual = row.sequence.inputs.visual
        self._features = features
        self._request = row.sequence.request
        self._prefix = row.work
        self._start = row.position
        self._num_pages = len(row.sequence.pages.ids)
        slot_1 = slot.prompt.device["adapter_slot"][index : index + 1]
        self._adapters = resources.adapters(slot_1, resources.rank(row.sequence.adapter.rank))

    def run_prefix(self) -> None:
        """BOS, and the image if there is one."""
        x_PD = self._model.prefix_embeddings(self._pixels)
        pages = self._slot.prompt.device["prefix_pages"][self._index]
        pages = pages[: len(self._prefix.compute_pages)]
        span = PrefillSpan(0, pages, bidirectional=True, adapters=self._adapters)
        self._model.cache_span(x_PD, span, self._kv)

    def run_long_prompt(self) -> None:
        """Run the prompt, after BOS if the prefix is missing and has no image."""
        if self._prefix.compute_pages and self._pixels is None:
            self.run_prefix()
        self.run_prompt()

    def run_prompt(self) -> None:
        """Run the prompt, one with images chunk by chunk, which bounds their features."""
        slot, tokens = self._slot, self._tokens
        size = tokens.stop - tokens.start if self._visual is None else CHUNK
        for first in range(tokens.start, tokens.stop, size):
            hidden_1D = self._run_chunk(slice(first, min(first + size, tokens.stop)))
        slot.hidden_RD[self._output].copy_(hidden_1D)
        slot.logits_RV[self._output].copy_(self._model.logits(hidden_1D))

    def _run_chunk(self, tokens: slice) -> torch.Tensor:
        """[1, D] of the last of these staged tokens."""
        model, staged = self._model, self._slot.prompt.device
        x_TD = model.embed(staged["token"][tokens], staged["payload"][tokens])
        pages = staged["pages"][self._index, : self._num_pages]
        start, visual = self._start + tokens.start - self._tokens.start, None
        if self._visual is not None:
            assert self._features is not None, "a visual prompt of a model without them"
            stop = start + len(x_TD)
            visual = self._features.rows(self._visual, start, stop, x_TD.device, self._request)
        span = PrefillSpan(start, pages, False, self._adapters, visual)
        return model.prefill(x_TD, span, self._kv)[-1:]


# ---------------------------------------------------------------- torch backend

# The backend of torch operations.


class TorchBackend:
    """Backend for CPUs and for GPUs without kernels for the model.

    Prefixes run eagerly, and so do prompts on a CPU and prompts with images.
    """

    def __init__(self, resources: Resources) -> None:
        self.buckets = resources.buckets
        on_cpu = resources.device.torch_device.type == "cpu"
        chunk = CPU_CHUNK if on_cpu else CHUNK
        self.limits = BatchLimits(
            resources.slots[0].max_prompts,
            tokens=min(CHUNK, resources.model.max_context),
            sampled=resources.buckets[-1],
            chunk_above=chunk,
            long_chunk_tokens=chunk,
            image_tokens=chunk,
        )
        self.encodes_images = False
        self._features = ImageFeatures(resources.model, resources.max_image_bytes)
        self._resources = resources
        self._slots = resources.slots
        self._graphs = resources.graphs
        self._prompts = None
        if resources.model.has_prefill_chunks and not on_cpu:
            self._prompts = CapturedPrompts.of_any_length(resources, CHUNK)
        self._drafting = None
        self._forcing = (False,) if resources.state.drafts is None else (False, True)
        if resources.state.drafts is not None:
            layouts = [StepLayout(bucket, 1) for bucket in self.buckets]
            self._drafting = DraftingDecode(resources, layouts)

    def warm_up(self) -> None:
        # A CPU captures nothing: one shape loads what all need.
        on_cpu = self._resources.device.torch_device.type == "cpu"
        buckets = self.buckets[:1] if on_cpu else self.buckets
        for slot in range(len(self._slots)):
            for grows, places, admits in product((False, True), repeat=3):
                self._prepare(slot, Changes(grows, places), admits=admits)
            for bucket in buckets:
                for rank, forces in product(self._resources.ranks, self._forcing):
                    self.decode(slot, bucket, rank, bucket, forces=forces)
                for sampled, payload in product((False, True), repeat=2):
                    self.sample(slot, bucket, sampled=sampled, payload=payload)
                for payload, alternatives in product((False, True), repeat=2):
                    self.logprobs(slot, bucket, payload=payload, alternatives=alternatives)
        if self._prompts is not None:
            self._prompts.warm_up()

    def decode(
        self, slot: int, bucket: int, rank: int, num_tokens: int, *, forces: bool = False
    ) -> None:
        if self._drafting is not None:
            self._graphs.run(self._drafting_work, slot, rank, forces)
        else:
            self._graphs.run(self._forward_work, slot, bucket, 1, rank)

    def offer_megakernel(
        self, max_rows: int, policy: BlockPolicy | None = None
    ) -> MegakernelOffer | str:
        del max_rows, policy
        return "needs kernels for the model"

    def prepare(self, slot: int, changes: Changes) -> None:
        self._prepare(slot, changes, admits=False)

    def _prepare(self, slot: int, changes: Changes, *, admits: bool) -> None:
        if any(changes) or admits:
            self._graphs.run(self._prepare_work, slot, *changes, admits)

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
                graphs.part(self._drafting_work, slot, rank, False),
                graphs.part(self._drafting_sample_work, slot, needs.sampled, payload),
            ]
        if needs.logprobs:
            works.append(graphs.captured(self._logprobs_work, slot, bucket, payload, False))
        return tuple(works)

    def prefill(
        self,
        slot: int,
        prompts: abc.Sequence[ScheduledSequence],
        decodes: abc.Sequence[ScheduledSequence],
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
        steps, first = list[PrefillStep](), 0
        for index, row in enumerate(prompts):
            output = len(decodes) + index
            steps.append(
                PrefillStep(
                    self._resources,
                    buffers,
                    row,
                    index=index,
                    first_token=first,
                    output=output,
                    features=self._features,
                )
            )
            first += row.num_tokens
            self._resources.write_adapter(row)
            if row.work.compute_pages:
                compute.submit(steps[-1].run_prefix)
        self._prepare(slot, changes, admits=True)
        if decodes:
            self.decode(slot, bucket, rank, bucket)
        for index, (row, step) in enumerate(zip(prompts, steps, strict=True)):
            sequence, captured = row.sequence, self._prompts
            if (
                captured is None
                or sequence.inputs.visual is not None
                or not captured.takes(row.position + row.num_tokens)
            ):
                compute.submit(step.run_prompt)
                continue
            prompt = ScheduledPrompt(sequence.row, row.position, scheduled_tokens(row))
            adapted, output = bool(sequence.adapter.key), len(decodes) + index
            captured.run(slot, index, prompt, output, adapted=adapted)

    def encode(self, slot: int, row: ScheduledSequence) -> None:
        """Encode pieces of a visual prompt; other images are cropped on the host."""
        visual, request = row.sequence.inputs.visual, row.sequence.request
        assert visual is not None, "an encode on a backend without an image encoder"
        pieces = range(row.work.first_piece, row.work.stop_piece)
        self._resources.compute.submit(lambda: self._features.encode(visual, pieces, request))

    def _drafting_work(self, slot: int, rank: int, forces: bool) -> Work:
        assert self._drafting is not None, "only draft tokens are placed by the device"
        return self._drafting.work(slot, self._forward_work, rank, forces=forces)

    def _forward_work(self, slot: int, bucket: int, num_groups: int, rank: int) -> Work:
        return DecodeStep(self._resources, self._slots[slot], bucket, rank).forward

    def _prepare_work(self, slot: int, grows: bool, places: bool, admits: bool) -> Work:
        return preparation(self._resources, slot, Changes(grows, places), admits=admits)

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
