"""The device work of one decode step, forward and sampling apart.

Both halves read and write only fixed buffers, so they can be captured as graphs.
"""

from __future__ import annotations

import torch

from legato_engine.layers.lora import AdapterBank
from legato_engine.models.model import Model
from legato_engine.models.paged_cache import DecodeBatch, KVCache
from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.row_state import RowState
from legato_engine.runtime.sampler import greedy, sample


class DecodeStep:
    """One batch size over one slot's buffers; `rank` 0 reads no adapters.

    Its forward proposes `block` tokens a row.
    """

    def __init__(
        self,
        model: Model,
        kv: KVCache,
        state: RowState,
        slot: DecodeSlot,
        batch: int,
        bank: AdapterBank | None,
        rank: int,
        block: int = 0,
    ) -> None:
        self._model = model
        self._kv = kv
        self._state = state
        self._slot = slot
        self._batch = batch
        self._bank = bank if rank else None
        self._rank = rank
        self._block = block

    def forward(self) -> None:
        """Last sampled tokens in, and those proposed behind them; residual stream, logits out."""
        model, state, slot, batch = self._model, self._state, self._slot, self._batch
        if state.drafts is not None:
            state.drafts.place(slot, batch, state.page_table_RM, self._block)
        row_B = slot.staged.device["row"][:batch]
        token_B = state.token_R[row_B]
        if state.drafts is not None:
            source_B = slot.staged.device["source"][:batch]
            token_B = torch.where(source_B < 0, slot.staged.device["token"][:batch], token_B)
        x_BD = model.embed(token_B, state.payload_R2[row_B])
        bank = self._bank
        where = DecodeBatch(
            slot.staged.device["position"][:batch],
            state.page_table_RM[row_B],
            bank.rows(state.adapter_slot_R[row_B], self._rank) if bank is not None else None,
        )
        hidden_BD = model.decode(x_BD, where, self._kv)
        slot.hidden_RD[:batch].copy_(hidden_BD)
        slot.logits_RV[:batch].copy_(model.logits(hidden_BD))

    def sample(self, constraints_CV: torch.Tensor, sampled: bool, payload: bool) -> None:
        """Constrained choice, its payload, and both remembered for the next forward.

        Of a row's several tokens `DraftState.settle` says which is newest; none has a payload.
        A row whose logits are not finite reports token -1 and feeds token 0.
        """
        model, state, slot, batch = self._model, self._state, self._slot, self._batch
        row_B = slot.staged.device["sample_row"][:batch]
        raw_BV = slot.logits_RV[:batch]
        logits_BV = raw_BV + constraints_CV[slot.constraint.device["constraint"][:batch]]
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
        if payload:
            payload_B2 = model.payload(slot.hidden_RD[:batch], token_B)
            state.payload_R2[row_B] = payload_B2
            slot.payload_R2[:batch].copy_(payload_B2)
        if state.drafts is not None:
            state.drafts.settle(slot, batch, state.token_R)
