"""The device work of a prefill: the prefix if it is missing, then what was not found behind it."""

from __future__ import annotations

import torch

from legato_engine.layers.lora import AdapterBank
from legato_engine.models.model import Adapter, KVCache, Model, PrefillSpan
from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.row_state import RowState
from legato_engine.scheduler.launch import Row
from legato_engine.sequence import Sequence, TokenKey
from legato_engine.speculative.proposer import UNKNOWN


def fed_tokens(row: Row) -> list[TokenKey]:
    """What a prefill feeds behind the prefix: of the prompt, and of an answer that is resumed."""
    first = row.position - row.sequence.prefix_length
    return row.sequence.tokens[first : first + row.num_tokens]


def stage_prefill(slot: DecodeSlot, row: Row, scratch_row: int) -> None:
    """Fill the slot's prompt buffer with what is fed, the pages and the sampling constants.

    Its first staged row becomes the last token fed, which is the one that is sampled from; the
    others are padding.
    """
    sequence = row.sequence
    slot.staged.host["row"].fill(scratch_row)
    slot.staged.host["row"][0] = sequence.row
    slot.staged.host["sample_position"][0] = row.position + row.num_tokens
    staged = slot.prompt.host
    tokens = fed_tokens(row)
    staged["token"][: len(tokens)] = [token_id for token_id, _ in tokens]
    staged["payload"][: len(tokens)] = [payload for _, payload in tokens]
    staged["prefix_pages"][: len(row.prefix.compute_pages)] = row.prefix.compute_pages
    staged["pages"].fill(0)
    staged["pages"][: len(sequence.page_ids)] = sequence.page_ids
    staged["adapter_slot"][0] = sequence.adapter_slot
    sampling = sequence.task.sampling
    staged["row"][0] = sequence.row
    staged["seed"][0] = (sampling.seed or 0) & ((1 << 63) - 1)
    staged["top_k"][0] = sampling.top_k or 0
    staged["temperature"][0] = sampling.temperature or 0.0
    staged["top_p"][0] = 1.0 if sampling.top_p is None else sampling.top_p
    if slot.speculates:
        _stage_history(slot, sequence)


def _stage_history(slot: DecodeSlot, sequence: Sequence) -> None:
    """All tokens known, also those whose KV was found, and where the sequence ends."""
    slot.staged.host["lane"].fill(0)
    history = slot.prompt.host["history"]
    history.fill(UNKNOWN)
    history[sequence.prefix_length : sequence.length] = [token for token, _ in sequence.tokens]
    slot.prompt.host["limit"][0] = sequence.max_length - 1


class PrefillStep:
    """One sequence's prefill over one slot's buffers.

    The prefix and what follows are always two passes, so a cached prefix gives the same bits as a
    fresh one. Values are taken from the sequence when this is made, on the scheduler's thread.
    """

    def __init__(
        self,
        model: Model,
        kv: KVCache,
        state: RowState,
        slot: DecodeSlot,
        bank: AdapterBank | None,
        row: Row,
    ) -> None:
        self._model = model
        self._kv = kv
        self._state = state
        self._slot = slot
        self._pixels = row.sequence.pixels
        self._prefix = row.prefix
        self._start = row.position
        self._count = row.num_tokens
        self._num_pages = len(row.sequence.page_ids)
        self._adapter_slot = row.sequence.adapter_slot
        self._adapter: Adapter | None = row.sequence.adapter if row.prefix.write_adapter else None
        rank = bank.bucket(row.sequence.adapter_rank) if bank is not None else 0
        self._bank = bank if rank else None
        slot_1 = slot.prompt.device["adapter_slot"]
        self._adapters = bank.rows(slot_1, rank) if bank is not None and rank else None

    def __call__(self) -> None:
        """Run on the compute stream; leaves the last position's outputs in row 0 of the slot."""
        self._state.admit(self._slot)
        self.write_adapter()
        if self._prefix.compute_pages:
            self.run_prefix()
        self.copy_tail()
        self.run_prompt()

    def write_adapter(self) -> None:
        """Put the sequence's adapter into its slot, unless it stands there."""
        if self._adapter is not None:
            assert self._bank is not None, "an adapter needs a bank"
            self._bank.write(self._adapter_slot, self._adapter.weights)

    def run_prefix(self) -> None:
        """Fill the prefix's pages: BOS, and the picture if there is one."""
        self.run_encoded_prefix(self._model.prefix_embeddings(self._pixels))

    def run_encoded_prefix(self, x_PD: torch.Tensor) -> None:
        """The same, of its embeddings."""
        pages = self._slot.prompt.device["prefix_pages"][: len(self._prefix.compute_pages)]
        span = PrefillSpan(0, pages, bidirectional=True, adapters=self._adapters)
        self._model.prefill(x_PD, span, self._kv)

    def copy_tail(self) -> None:
        """Give the sequence its own copy of a page that it shares only in part."""
        if self._prefix.copy_tail is not None:
            source, destination = self._prefix.copy_tail
            self._kv.k_LNHSE[:, destination].copy_(self._kv.k_LNHSE[:, source])
            self._kv.v_LNHSE[:, destination].copy_(self._kv.v_LNHSE[:, source])

    def run_long_prompt(self) -> None:
        """The prompt, and BOS before it where no picture stands there."""
        if self._prefix.compute_pages and self._pixels is None:
            self.run_prefix()
        self.run_prompt()

    def run_prompt(self) -> None:
        """Fill the prompt's positions; the last one's outputs become the slot's first row."""
        slot, model, staged = self._slot, self._model, self._slot.prompt.device
        x_TD = model.embed(staged["token"][: self._count], staged["payload"][: self._count])
        pages = staged["pages"][: self._num_pages]
        span = PrefillSpan(self._start, pages, bidirectional=False, adapters=self._adapters)
        hidden_1D = model.prefill(x_TD, span, self._kv)[-1:]
        slot.hidden_RD[:1].copy_(hidden_1D)
        slot.logits_RV[:1].copy_(model.logits(hidden_1D))
