"""The torch operations of one decode step.

They read and write only fixed buffers, so they can be captured.
"""

from __future__ import annotations

import torch

from legato_engine.models.paged_cache import DecodeBatch
from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.resources import Resources
from legato_engine.runtime.sampler import greedy, sample


class DecodeStep:
    """A step of one batch size over one slot's buffers.

    `rank` 0 reads no adapters.
    """

    def __init__(self, resources: Resources, slot: DecodeSlot, batch: int, rank: int = 0) -> None:
        self._resources = resources
        self._values = resources.model.capabilities.values
        self._slot = slot
        self._batch = batch
        self._rank = rank

    def forward(self) -> None:
        resources, slot, batch = self._resources, self._slot, self._batch
        model, state = resources.model, resources.state
        row_B = slot.staged.device["row"][:batch]
        token_B = state.token_R[row_B]
        if state.drafts is not None:
            source_B = slot.staged.device["source"][:batch]
            token_B = torch.where(source_B < 0, slot.staged.device["token"][:batch], token_B)
        x_BD = model.embed(token_B, state.payload_R2[row_B])
        decode_batch = DecodeBatch(
            slot.staged.device["position"][:batch],
            state.page_table_RM[row_B],
            resources.adapters(state.adapter_slot_R[row_B], self._rank),
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
        if payload and self._values is not None:
            hidden_BD = slot.hidden_RD[:batch]
            payload_B2, certainty_B2 = self._values.values(hidden_BD, token_B, logits_BV)
            state.payload_R2[row_B] = payload_B2
            slot.payload_R2[:batch].copy_(payload_B2)
            slot.certainty_R2[:batch].copy_(certainty_B2)
        if state.drafts is not None and settles:
            state.drafts.settle(slot, batch, state.token_R)
