"""Staging and torch operations of a prefill."""

from __future__ import annotations

from collections.abc import Sequence as Many

from legato_engine.kernels import ops
from legato_engine.models.capabilities import Adapter
from legato_engine.models.paged_cache import PrefillSpan
from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.passes import stage_tokens
from legato_engine.runtime.request_descriptors import (
    DESCRIPTOR,
    NO_DRAFTS,
    initial_descriptor,
)
from legato_engine.runtime.resources import Resources
from legato_engine.scheduler.launch import ScheduledSequence
from legato_engine.sequence import Sequence, TokenKey
from legato_engine.speculative.block_policy import INITIAL_RATE
from legato_engine.speculative.proposer import UNKNOWN


def scheduled_tokens(row: ScheduledSequence) -> list[TokenKey]:
    """The tokens after the prefix, those of a resumed answer included."""
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
    ) -> None:
        self._resources = resources
        self._model = resources.model
        self._kv = resources.kv
        self._slot = slot
        self._index = index
        self._tokens = slice(first_token, first_token + row.num_tokens)
        self._output = slice(output, output + 1)
        self._pixels = row.sequence.inputs.image
        self._prefix = row.work
        self._start = row.position
        self._num_pages = len(row.sequence.pages.ids)
        self._adapter_slot = row.sequence.adapter.slot
        self._adapter: Adapter | None = (
            row.sequence.inputs.adapter if row.work.write_adapter else None
        )
        slot_1 = slot.prompt.device["adapter_slot"][index : index + 1]
        self._adapters = resources.adapters(slot_1, resources.rank(row.sequence.adapter.rank))

    def __call__(self) -> None:
        self.write_adapter()
        if self._prefix.compute_pages:
            self.run_prefix()
        self.copy_tail()
        self.run_prompt()

    def write_adapter(self) -> None:
        if self._adapter is not None:
            bank = self._resources.bank
            assert bank is not None, f"adapter {self._adapter.key} without an adapter bank"
            bank.write(self._adapter_slot, self._adapter.weights)

    def run_prefix(self) -> None:
        """BOS, and the image if there is one."""
        x_PD = self._model.prefix_embeddings(self._pixels)
        pages = self._slot.prompt.device["prefix_pages"][self._index]
        pages = pages[: len(self._prefix.compute_pages)]
        span = PrefillSpan(0, pages, bidirectional=True, adapters=self._adapters)
        self._model.cache_span(x_PD, span, self._kv)

    def copy_tail(self) -> None:
        """Copy a page that is shared only in part, because the sequence writes to the rest."""
        if self._prefix.copy_tail is not None:
            copied_12 = self._slot.prompt.device["copied"][self._index : self._index + 1]
            ops.copy_pages(self._kv.k_LNHSE, self._kv.v_LNHSE, copied_12)

    def run_long_prompt(self) -> None:
        """Run the prompt, after BOS if the prefix is missing and has no image."""
        if self._prefix.compute_pages and self._pixels is None:
            self.run_prefix()
        self.run_prompt()

    def run_prompt(self) -> None:
        slot, model, staged = self._slot, self._model, self._slot.prompt.device
        x_TD = model.embed(staged["token"][self._tokens], staged["payload"][self._tokens])
        pages = staged["pages"][self._index, : self._num_pages]
        span = PrefillSpan(self._start, pages, bidirectional=False, adapters=self._adapters)
        hidden_1D = model.prefill(x_TD, span, self._kv)[-1:]
        slot.hidden_RD[self._output].copy_(hidden_1D)
        slot.logits_RV[self._output].copy_(model.logits(hidden_1D))
