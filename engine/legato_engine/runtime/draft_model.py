"""Another, smaller model as the draft: it reads text alone, and has a cache of its own.

Shape legend: R rows, K proposed tokens, C positions, W tokens that a row catches up at once,
M pages of a row, D the draft's width, B tokens of any rows.
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
    """A `speculative.proposer.Proposer` by any `Model`, which goes on by its likeliest tokens.

    It knows nothing of pictures and values: its positions count from a row's first known token. Of
    each row it remembers which tokens are in its cache, so that a new sequence, and a proposal that
    was rejected, are seen by comparing; behind the first that differs it feeds what is known, at
    most `CATCH_UP` tokens a proposal, and says nothing until it has the newest. Shapes are fixed
    and nothing is read on the host, so it can be captured.
    """

    def __init__(self, model: Model, device: Device, *, num_rows: int, vocab_size: int) -> None:
        """`num_rows` without the scratch row, `vocab_size` of the model it drafts for.

        Raises `InvalidField` where the vocabularies differ.
        """
        if model.vocab_size != vocab_size:
            raise InvalidField(
                f"a draft with {model.vocab_size} tokens, the model has {vocab_size}", field="draft"
            )
        on = device.torch_device
        num_pages = -(-model.max_context // _PAGE_SIZE)
        rows = num_rows + 1
        self._model = model
        self._scratch = num_rows
        self._kv = allocate(model, device, 1 + rows * num_pages, _PAGE_SIZE)
        self._table_RM = 1 + torch.arange(rows * num_pages, device=on).view(rows, num_pages)
        self._table_RM[self._scratch] = 0
        self._fed_RC = torch.full((rows, model.max_context), UNKNOWN, device=on)
        self._place_C = torch.arange(model.max_context, device=on)

    def propose(self, history: RowHistory, draft_RK: torch.Tensor) -> None:
        """See `proposer.Proposer`."""
        row_R, (said_RC, newest_R) = history.row_R, self._from_first(history)
        new_RC = (said_RC != self._fed_RC[row_R]) | (self._place_C >= newest_R[:, None])
        first_R = new_RC.to(torch.uint8).argmax(1)
        behind_R = newest_R - first_R
        knows_R = (newest_R < self._place_C.shape[0]) & (behind_R < CATCH_UP)
        place_RW = first_R[:, None] + self._place_C[:CATCH_UP]
        is_said_RW = (place_RW <= newest_R[:, None]) & (place_RW < self._place_C.shape[0])
        token_RW = said_RC.gather(1, place_RW.clamp(max=self._place_C.shape[0] - 1))
        hidden_BD = self._feed(
            row_R[:, None].expand_as(place_RW).flatten(),
            token_RW.flatten(),
            place_RW.flatten(),
            is_said_RW.flatten(),
        )
        last_R = behind_R.clamp(0, CATCH_UP - 1)
        hidden_RWD = hidden_BD.view(*place_RW.shape, -1)
        index_R11 = last_R[:, None, None].expand(-1, 1, hidden_RWD.shape[-1])
        hidden_RD = hidden_RWD.gather(1, index_R11)[:, 0]
        for step in range(draft_RK.shape[1]):
            token_R = self._model.logits(hidden_RD).argmax(-1)
            draft_RK[:, step] = token_R.masked_fill(~knows_R, UNKNOWN)
            place_R = newest_R + step + 1
            if step + 1 < draft_RK.shape[1]:
                fits_R = knows_R & (place_R < self._place_C.shape[0])
                hidden_RD = self._feed(row_R, token_R, place_R, fits_R)

    def _from_first(self, history: RowHistory) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's tokens from its first known one on, as many as fit, and the newest's place."""
        tokens_RC = history.tokens_RC
        first_R = (tokens_RC != UNKNOWN).to(torch.uint8).argmax(1)
        place_RC = first_R[:, None] + self._place_C
        said_RC = tokens_RC.gather(1, place_RC.clamp(max=tokens_RC.shape[1] - 1))
        return said_RC, history.position_R - first_R

    def _feed(
        self,
        row_B: torch.Tensor,
        token_B: torch.Tensor,
        place_B: torch.Tensor,
        is_fed_B: torch.Tensor,
    ) -> torch.Tensor:
        """[B, D] residual streams; those not fed are padding."""
        row_B = row_B.masked_fill(~is_fed_B, self._scratch)
        place_B = place_B.masked_fill(~is_fed_B, 0)
        token_B = token_B.clamp(min=0)
        self._fed_RC[row_B, place_B] = token_B
        payload_B2 = torch.zeros(len(token_B), 2, device=token_B.device)
        batch = DecodeBatch(place_B, self._table_RM[row_B])
        return self._model.decode(self._model.embed(token_B, payload_B2), batch, self._kv)
