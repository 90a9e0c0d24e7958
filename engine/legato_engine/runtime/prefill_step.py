"""The device work of a prefill: the prefix if it is missing, then what was not found behind it."""

from __future__ import annotations

from collections.abc import Sequence as Many

from legato_engine.kernels import ops
from legato_engine.layers.lora import AdapterBank
from legato_engine.models.model import Adapter, Model
from legato_engine.models.paged_cache import KVCache, PrefillSpan
from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.scheduler.launch import Row
from legato_engine.sequence import Sequence, TokenKey
from legato_engine.speculative.proposer import UNKNOWN


def scheduled_tokens(row: Row) -> list[TokenKey]:
    """What a prefill feeds behind the prefix: of the prompt, and of an answer that is resumed."""
    first = row.position - row.sequence.prefix_length
    return row.sequence.tokens[first : first + row.num_tokens]


def stage_prompts(slot: DecodeSlot, rows: Many[Row], scratch_row: int) -> None:
    """Fill the slot's prompt buffer with what is fed, the pages and the sampling constants.

    The tokens lie one behind another; there have to be as many places as rows.
    """
    staged, first = slot.prompt.host, 0
    staged["row"].fill(scratch_row)
    staged["pages"].fill(0)  # the scratch row's are page 0
    staged["adapter_slot"].fill(0)  # and it has no adapter
    staged["copied"].fill(0)
    for place, row in enumerate(rows):
        sequence, tokens = row.sequence, scheduled_tokens(row)
        end = first + len(tokens)
        staged["token"][first:end] = [token_id for token_id, _ in tokens]
        staged["payload"][first:end] = [payload for _, payload in tokens]
        first = end
        pages = row.prefix.compute_pages
        staged["prefix_pages"][place, : len(pages)] = pages
        staged["pages"][place, : len(sequence.page_ids)] = sequence.page_ids
        if row.prefix.copy_tail is not None:
            staged["copied"][place] = row.prefix.copy_tail
        staged["adapter_slot"][place] = sequence.adapter_slot
        sampling = sequence.task.sampling
        staged["row"][place] = sequence.row
        staged["seed"][place] = (sampling.seed or 0) & ((1 << 63) - 1)
        staged["top_k"][place] = sampling.top_k or 0
        staged["temperature"][place] = sampling.temperature or 0.0
        staged["top_p"][place] = 1.0 if sampling.top_p is None else sampling.top_p
        if slot.speculates:
            _stage_history(slot, place, sequence)


def stage_samples(slot: DecodeSlot, rows: Many[Row], scratch_row: int, *, copy: int = 0) -> None:
    """Say where the token goes that is sampled from the last one that each row feeds.

    They are the slot's first rows in their order; the others are padding.
    """
    staged, count = slot.staged.hosts[copy], len(rows)
    staged["sample_row"].fill(scratch_row)
    staged["sample_row"][:count] = [row.sequence.row for row in rows]
    staged["sample_position"][:count] = [row.position + row.num_tokens for row in rows]
    if slot.speculates:
        staged["row"].fill(scratch_row)
        staged["row"][:count] = staged["sample_row"][:count]
        staged["draft_index"].fill(0)


def _stage_history(slot: DecodeSlot, place: int, sequence: Sequence) -> None:
    """All tokens known, also those whose KV was found, and where the sequence ends."""
    history = slot.prompt.host["history"][place]
    history.fill(UNKNOWN)
    history[sequence.prefix_length : sequence.length] = [token for token, _ in sequence.tokens]
    slot.prompt.host["limit"][place] = sequence.max_length - 1


class PrefillStep:
    """One sequence's prefill over one slot's buffers, behind its admission.

    The prompt stands at `place` of those of its launch, its tokens from `first` on; its last
    position's outputs become row `sampled` of the slot. The prefix and what follows are always two
    passes, so a cached prefix gives the same bits as a fresh one. Values are taken from the
    sequence when this is made, on the scheduler's thread.
    """

    def __init__(
        self,
        model: Model,
        kv: KVCache,
        slot: DecodeSlot,
        bank: AdapterBank | None,
        row: Row,
        *,
        place: int = 0,
        first: int = 0,
        sampled: int = 0,
    ) -> None:
        self._place = place
        self._fed = slice(first, first + row.num_tokens)
        self._sampled = slice(sampled, sampled + 1)
        self._model = model
        self._kv = kv
        self._slot = slot
        self._pixels = row.sequence.pixels
        self._prefix = row.prefix
        self._start = row.position
        self._num_pages = len(row.sequence.page_ids)
        self._adapter_slot = row.sequence.adapter_slot
        self._adapter: Adapter | None = row.sequence.adapter if row.prefix.write_adapter else None
        rank = bank.bucket(row.sequence.adapter_rank) if bank is not None else 0
        self._bank = bank if rank else None
        slot_1 = slot.prompt.device["adapter_slot"][place : place + 1]
        self._adapters = bank.rows(slot_1, rank) if bank is not None and rank else None

    def __call__(self) -> None:
        """Run on the compute stream."""
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
        x_PD = self._model.prefix_embeddings(self._pixels)
        pages = self._slot.prompt.device["prefix_pages"][self._place]
        pages = pages[: len(self._prefix.compute_pages)]
        span = PrefillSpan(0, pages, bidirectional=True, adapters=self._adapters)
        self._model.cache_span(x_PD, span, self._kv)

    def copy_tail(self) -> None:
        """Give the sequence its own copy of a page that it shares only in part."""
        if self._prefix.copy_tail is not None:
            copied_12 = self._slot.prompt.device["copied"][self._place : self._place + 1]
            ops.copy_pages(self._kv.k_LNHSE, self._kv.v_LNHSE, copied_12)

    def run_long_prompt(self) -> None:
        """The prompt, and BOS before it where no picture stands there."""
        if self._prefix.compute_pages and self._pixels is None:
            self.run_prefix()
        self.run_prompt()

    def run_prompt(self) -> None:
        """Fill the prompt's positions; the last one's outputs become the slot's."""
        slot, model, staged = self._slot, self._model, self._slot.prompt.device
        x_TD = model.embed(staged["token"][self._fed], staged["payload"][self._fed])
        pages = staged["pages"][self._place, : self._num_pages]
        span = PrefillSpan(self._start, pages, bidirectional=False, adapters=self._adapters)
        hidden_1D = model.prefill(x_TD, span, self._kv)[-1:]
        slot.hidden_RD[self._sampled].copy_(hidden_1D)
        slot.logits_RV[self._sampled].copy_(model.logits(hidden_1D))
