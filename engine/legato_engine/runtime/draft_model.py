"""A draft that is a smaller model with a KV cache of its own.

Shape legend: R rows, K draft tokens, C positions, W tokens that a row catches up at once, M pages
of a row, D the draft's width, B tokens of any rows.
"""

from __future__ import annotations

import torch

from legato_engine.device.base import Device
from legato_engine.errors import InvalidField
from legato_engine.models.model import Model
from legato_engine.models.paged_cache import DecodeBatch
from legato_engine.runtime.kv_pool import allocate
from legato_engine.speculative.proposer import UNKNOWN, RowHistory

CATCH_UP = 8
_PAGE_SIZE = 16


class DraftModel:
    """A `Proposer` that takes the likeliest tokens of any `Model`.

    It sees text alone: its positions count from a row's first known token. Comparing its cached
    tokens with each row's history finds new sequences and rejected draft tokens alike. From the
    first difference it feeds up to `CATCH_UP` known tokens per proposal, and proposes nothing until
    it has the newest. It can be captured.
    """

    sequential = True

    def __init__(self, model: Model, device: Device, *, num_rows: int, vocab_size: int) -> None:
        """Allocate a cache for `num_rows` rows, and the scratch row.

        Raises:
            InvalidField: the draft's vocabulary is not `vocab_size`, the served model's.
        """
        if model.vocab_size != vocab_size:
            raise InvalidField(
                f"the draft has {model.vocab_size} tokens, the model has {vocab_size}",
                field="draft",
            )
        on = device.torch_device
        num_pages = -(-model.max_context // _PAGE_SIZE)
        rows = num_rows + 1
        self._model = model
        self._scratch = num_rows
        self._kv = allocate(model, device, 1 + rows * num_pages, _PAGE_SIZE)
        self._table_RM = 1 + torch.arange(rows * num_pages, device=on).view(rows, num_pages)
        self._table_RM[self._scratch] = 0
        self._cached_RC = torch.full((rows, model.max_context), UNKNOWN, device=on)
        self._position_C = torch.arange(model.max_context, device=on)

    def propose(self, history: RowHistory, draft_RK: torch.Tensor) -> None:
        row_R, (known_RC, newest_R) = history.row_R, self._from_first(history)
        context = self._position_C.shape[0]
        new_RC = (known_RC != self._cached_RC[row_R]) | (self._position_C >= newest_R[:, None])
        first_R = new_RC.to(torch.uint8).argmax(1)
        missing_R = newest_R - first_R
        ready_R = (newest_R < context) & (missing_R < CATCH_UP)
        position_RW = first_R[:, None] + self._position_C[:CATCH_UP]
        is_known_RW = (position_RW <= newest_R[:, None]) & (position_RW < context)
        token_RW = known_RC.gather(1, position_RW.clamp(max=context - 1))
        hidden_BD = self._feed(
            row_R[:, None].expand_as(position_RW).flatten(),
            token_RW.flatten(),
            position_RW.flatten(),
            is_known_RW.flatten(),
        )
        last_R = missing_R.clamp(0, CATCH_UP - 1)
        hidden_RWD = hidden_BD.view(*position_RW.shape, -1)
        index_R11 = last_R[:, None, None].expand(-1, 1, hidden_RWD.shape[-1])
        hidden_RD = hidden_RWD.gather(1, index_R11)[:, 0]
        for step in range(draft_RK.shape[1]):
            token_R = self._model.logits(hidden_RD).argmax(-1)
            draft_RK[:, step] = token_R.masked_fill(~ready_R, UNKNOWN)
            position_R = newest_R + step + 1
            if step + 1 < draft_RK.shape[1]:
                fits_R = ready_R & (position_R < context)
                hidden_RD = self._feed(row_R, token_R, position_R, fits_R)

    def _from_first(self, history: RowHistory) -> tuple[torch.Tensor, torch.Tensor]:
        tokens_RC = history.tokens_RC
        first_R = (tokens_RC != UNKNOWN).to(torch.uint8).argmax(1)
        position_RC = first_R[:, None] + self._position_C
        known_RC = tokens_RC.gather(1, position_RC.clamp(max=tokens_RC.shape[1] - 1))
        return known_RC, history.position_R - first_R

    def _feed(
        self,
        row_B: torch.Tensor,
        token_B: torch.Tensor,
        position_B: torch.Tensor,
        is_fed_B: torch.Tensor,
    ) -> torch.Tensor:
        """[B, D] residual streams; others become padding."""
        row_B = row_B.masked_fill(~is_fed_B, self._scratch)
        position_B = position_B.masked_fill(~is_fed_B, 0)
        token_B = token_B.clamp(min=0)
        self._cached_RC[row_B, position_B] = token_B
        payload_B2 = torch.zeros(len(token_B), 2, device=token_B.device)
        batch = DecodeBatch(position_B, self._table_RM[row_B])
        return self._model.decode(self._model.embed(token_B, payload_B2), batch, self._kv)
