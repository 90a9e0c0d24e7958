"""Draft proposers: the interface and prompt lookup.

Shape legend: R rows of the device's state, C positions, K draft tokens, D width, M pages.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
import torch.nn.functional as F

UNKNOWN = -1
"""Token id of a position without one, or of a draft token that was not proposed."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowHistory:
    """Tokens of rows on the device, one step ahead of the host; ids are int64.

    `row_R` are all rows of the state or a subset. `tokens_RC` holds the prompt's and the committed
    ids by position, up to `position_R`, the newest; all else is `UNKNOWN`, the shared prefix
    included. `hidden_RD` is the residual stream that the newest token was sampled from.
    `page_table_RM` names the KV pages of all positions before `position_R`.
    """

    row_R: torch.Tensor
    tokens_RC: torch.Tensor
    position_R: torch.Tensor
    hidden_RD: torch.Tensor
    page_table_RM: torch.Tensor


class Proposer(Protocol):
    """Proposer of draft tokens on the device, before the host has read the newest token.

    A wrong token costs time and never changes a result.
    """

    @property
    def sequential(self) -> bool:
        """Return whether each draft token costs time, so that short blocks are proposed."""

    def propose(self, history: RowHistory, draft_RK: torch.Tensor) -> None:
        """Write up to K draft tokens a row, `UNKNOWN` from the first missing one on.

        Only enqueues work on the compute stream and reads nothing on the host: it may be captured.
        """


# ---------------------------------------------------------------- lookup


class LookupProposer:
    """Proposer of the tokens after the latest earlier occurrence of the current n-gram.

    Longer matches win. A draft that reaches the newest token repeats from the matched position.
    """

    sequential = False

    def __init__(self, *, shortest: int = 1, longest: int = 4) -> None:
        assert 1 <= shortest <= longest, f"no n-grams of {shortest} to {longest}"
        self._shortest = shortest
        self._longest = longest

    def propose(self, history: RowHistory, draft_RK: torch.Tensor) -> None:
        tokens_RC, newest_R1 = history.tokens_RC, history.position_R[:, None]
        index_C = torch.arange(tokens_RC.shape[1], device=tokens_RC.device)
        agree_RC = index_C < newest_R1
        num_agreed_RC = torch.zeros_like(tokens_RC)
        for back in range(self._longest):
            tail_R1 = tokens_RC.gather(1, (newest_R1 - back).clamp(min=0))
            before_RC = F.pad(tokens_RC, (back, 0), value=UNKNOWN)[:, : len(index_C)]
            agree_RC = agree_RC & (before_RC == tail_R1) & (before_RC != UNKNOWN)
            num_agreed_RC += agree_RC
        rank_RC = num_agreed_RC * len(index_C) + index_C
        best_R, end_R = rank_RC.masked_fill(num_agreed_RC < self._shortest, -1).max(1)
        period_R1 = (newest_R1 - end_R[:, None]).clamp(min=1)
        step_K = torch.arange(draft_RK.shape[1], device=tokens_RC.device)
        guess_RK = tokens_RC.gather(1, end_R[:, None] + 1 + step_K % period_R1)
        draft_RK.copy_(guess_RK.masked_fill(best_R[:, None] < 0, UNKNOWN))
