"""Backend of torch operations.

They read and write only fixed buffers, so they can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import product

import torch

from legato_engine.kernels.decode_loop import MegakernelOffer
from legato_engine.kernels.proposer import UNKNOWN
from legato_engine.layers.lora import AdaptedRows
from legato_engine.models.base import Model
from legato_engine.models.paged_attention import DecodeBatch, PrefillSpan, VisualRows
from legato_engine.runtime.backend import StepBackend
from legato_engine.runtime.decode_slot import DecodeSlot, Resources, StepLayout
from legato_engine.runtime.descriptors import DESCRIPTOR, NO_DRAFTS, initial_descriptor
from legato_engine.runtime.graphs import Work
from legato_engine.runtime.prompts import CapturedPrompts
from legato_engine.runtime.sampler import greedy, sample
from legato_engine.runtime.staging import (
    Changes,
    ScheduledPrompt,
    bucket_for,
    stage_step,
    stage_tokens,
)
from legato_engine.scheduler.batch import BatchLimits, ScheduledSequence
from legato_engine.sequence import Sequence, TokenKey, VisualInputs
from legato_engine.speculation import INITIAL_RATE, BlockPolicy
from legato_engine.types import Request


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


# Prefix and private tokens are always two passes, so that a cached prefix and a fresh one have the
# same bits. Work reads the sequence when it is made, on the scheduler's thread.


def prefix_work(
    resources: Resources, slot: DecodeSlot, row: ScheduledSequence, index: int = 0
) -> Work:
    """Run BOS, and the image if there is one, of prompt `index` of the slot's launch."""
    model, pixels = resources.model, row.sequence.inputs.image
    pages_M = slot.prompt.device["prefix_pages"][index, : len(row.work.compute_pages)]
    adapters = _adapters(resources, slot, row, index)

    def work() -> None:
        span = PrefillSpan(0, pages_M, bidirectional=True, adapters=adapters)
        model.cache_span(model.prefix_embeddings(pixels), span, resources.kv)

    return work


def prompt_work(
    resources: Resources,
    slot: DecodeSlot,
    row: ScheduledSequence,
    *,
    index: int = 0,
    first_token: int = 0,
    output: int = 0,
    features: ImageFeatures | None = None,
) -> Work:
    """Run prompt `index` of a launch, one with images chunk by chunk, which bounds their features.

    Its tokens start at staged token `first_token`, and its last position's outputs become row
    `output` of the slot.
    """
    model, staged, sequence = resources.model, slot.prompt.device, row.sequence
    visual, request = sequence.inputs.visual, sequence.request
    start, end = row.position, first_token + row.num_tokens
    pages_M = staged["pages"][index, : len(sequence.pages.ids)]
    adapters = _adapters(resources, slot, row, index)

    def run_chunk(first: int, stop: int) -> torch.Tensor:
        """[1, D] of the last of these staged tokens."""
        x_TD = model.embed(staged["token"][first:stop], staged["payload"][first:stop])
        begin, rows = start + first - first_token, None
        if visual is not None:
            assert features is not None, "a visual prompt of a model without them"
            rows = features.rows(visual, begin, begin + len(x_TD), x_TD.device, request)
        span = PrefillSpan(begin, pages_M, False, adapters, rows)
        return model.prefill(x_TD, span, resources.kv)[-1:]

    def work() -> None:
        size = end - first_token if visual is None else CHUNK
        for first in range(first_token, end, size):
            hidden_1D = run_chunk(first, min(first + size, end))
        slot.hidden_RD[output : output + 1].copy_(hidden_1D)
        slot.logits_RV[output : output + 1].copy_(model.logits(hidden_1D))

    return work


def _adapters(
    resources: Resources, slot: DecodeSlot, row: ScheduledSequence, index: int
) -> AdaptedRows | None:
    slot_1 = slot.prompt.device["adapter_slot"][index : index + 1]
    return resources.adapters(slot_1, resources.rank(row.sequence.adapter.rank))


# ---------------------------------------------------------------- torch backend


class TorchBackend(StepBackend):
    """Backend for CPUs and for GPUs without kernels for the model.

    Prefixes run eagerly, and so do prompts on a CPU and prompts with images.
    """

    def __init__(self, resources: Resources) -> None:
        super().__init__(resources, [StepLayout(bucket, 1) for bucket in resources.buckets])
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
        self._features = ImageFeatures(resources.model, resources.max_image_bytes)
        self._prompts = None
        if resources.model.has_prefill_chunks and not on_cpu:
            self._prompts = CapturedPrompts.of_any_length(resources, CHUNK)

    def warm_up(self) -> None:
        # A CPU captures nothing: one shape loads what all need.
        on_cpu = self._resources.device.torch_device.type == "cpu"
        buckets = self.buckets[:1] if on_cpu else self.buckets
        forcing = (False,) if self._drafting is None else (False, True)
        for slot in range(len(self._slots)):
            for grows, places, admits in product((False, True), repeat=3):
                self.prepare(slot, Changes(grows, places), admits=admits)
            for bucket in buckets:
                for rank, forces in product(self._resources.ranks, forcing):
                    self.decode(slot, bucket, rank, bucket, forces=forces)
                for sampled, payload in product((False, True), repeat=2):
                    self.sample(slot, bucket, sampled=sampled, payload=payload)
                for payload, alternatives in product((False, True), repeat=2):
                    self.logprobs(slot, bucket, payload=payload, alternatives=alternatives)
        if self._prompts is not None:
            self._prompts.warm_up()

    def offer_megakernel(
        self, max_rows: int, policy: BlockPolicy | None = None
    ) -> MegakernelOffer | str:
        del max_rows, policy
        return "needs kernels for the model"

    def prefill(
        self,
        slot: int,
        prompts: Many[ScheduledSequence],
        decodes: Many[ScheduledSequence],
        rank: int,
        changes: Changes,
    ) -> None:
        buffers, compute, state = self._slots[slot], self._resources.compute, self._state
        stage_prompts(buffers, prompts, state.scratch_row)
        stage_samples(buffers, (*decodes, *prompts), state.scratch_row)
        bucket = bucket_for(self.buckets, len(decodes))
        if decodes:
            stage_step(buffers, decodes, bucket, state.scratch_row)
        buffers.staged.upload_from(buffers.prompt, compute)
        for index, row in enumerate(prompts):
            self._resources.write_adapter(row)
            if row.work.compute_pages:
                compute.submit(prefix_work(self._resources, buffers, row, index))
        self.prepare(slot, changes, admits=True)
        if decodes:
            self.decode(slot, bucket, rank, bucket)
        first = 0
        for index, row in enumerate(prompts):
            sequence, captured, output = row.sequence, self._prompts, len(decodes) + index
            if (
                captured is None
                or sequence.inputs.visual is not None
                or not captured.takes(row.position + row.num_tokens)
            ):
                work = prompt_work(
                    self._resources,
                    buffers,
                    row,
                    index=index,
                    first_token=first,
                    output=output,
                    features=self._features,
                )
                compute.submit(work)
            else:
                prompt = ScheduledPrompt(sequence.row, row.position, scheduled_tokens(row))
                captured.run(slot, index, prompt, output, adapted=bool(sequence.adapter.key))
            first += row.num_tokens

    def encode(self, slot: int, row: ScheduledSequence) -> None:
        """Encode pieces of a visual prompt; other images are cropped on the host."""
        visual, request = row.sequence.inputs.visual, row.sequence.request
        assert visual is not None, "an encode on a backend without an image encoder"
        pieces = range(row.work.first_piece, row.work.stop_piece)
        self._resources.compute.submit(lambda: self._features.encode(visual, pieces, request))

    def _forward_shape(self, bucket: int, num_tokens: int, rank: int) -> tuple[int, int, int]:
        return bucket, 1, rank

    def _forward_work(
        self, slot: int, bucket: int, num_groups: int, rank: int, sampled: bool = True
    ) -> Work:
        resources, buffers = self._resources, self._slots[slot]
        model, state, staged = resources.model, self._state, buffers.staged.device

        def work() -> None:
            row_B = staged["row"][:bucket]
            token_B = torch.where(
                staged["source"][:bucket] < 0, staged["token"][:bucket], state.token_R[row_B]
            )
            x_BD = model.embed(token_B, state.payload_R2[row_B])
            decode_batch = DecodeBatch(
                staged["position"][:bucket],
                state.page_table_RM[row_B],
                resources.adapters(state.adapter_slot_R[row_B], rank),
                None if state.rope_offset_R is None else state.rope_offset_R[row_B],
            )
            hidden_BD = model.decode(x_BD, decode_batch, resources.kv)
            buffers.hidden_RD[:bucket].copy_(hidden_BD)
            buffers.logits_RV[:bucket].copy_(model.logits(hidden_BD))

        return work

    def _sample_work(
        self, slot: int, bucket: int, sampled: bool, payload: bool, settles: bool = True
    ) -> Work:
        """Choose tokens and payloads, and keep both for the next forward.

        A row whose logits are not finite returns token -1 and feeds token 0. Of several tokens of
        one row, `DraftState.settle` finds the newest, here if this `settles`; draft tokens have no
        payload.
        """
        resources, buffers = self._resources, self._slots[slot]
        model, state, staged = resources.model, self._state, buffers.staged.device

        def work() -> None:
            row_B = staged["sample_row"][:bucket]
            raw_BV = buffers.logits_RV[:bucket]
            logits_BV = raw_BV + resources.constraints_CV[buffers.constraints(bucket)]
            if sampled:
                token_B = sample(
                    logits_BV,
                    state.temperature_R[row_B],
                    state.top_p_R[row_B],
                    state.top_k_R[row_B],
                    state.seed_R[row_B],
                    staged["sample_position"][:bucket],
                )
            else:
                token_B = greedy(logits_BV)
            finite_B = torch.isfinite(raw_BV.sum(-1))
            token_B = torch.where(finite_B, token_B, 0)
            state.token_R[row_B] = token_B
            buffers.tokens_R[:bucket].copy_(torch.where(finite_B, token_B, -1))
            if payload and model.has_value_heads:
                hidden_BD = buffers.hidden_RD[:bucket]
                payload_B2, certainty_B2 = model.values(hidden_BD, token_B, logits_BV)
                state.payload_R2[row_B] = payload_B2
                buffers.payload_R2[:bucket].copy_(payload_B2)
                buffers.certainty_R2[:bucket].copy_(certainty_B2)
            if state.drafts is not None and settles:
                state.drafts.settle(buffers, bucket, state.token_R)

        return work
