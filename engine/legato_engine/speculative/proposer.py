"""The interface of proposers, and what they see of the rows they propose for.

Shape legend: R rows of the device's state, C positions, K draft tokens, D width, M pages.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch  # the policies beside this module never load torch

UNKNOWN = -1
"""Marks a position without a token id, and a draft token that was not proposed."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowHistory:
    """The rows' tokens on the device, one step ahead of the host; ids are int64.

    `row_R` are the rows, all of the state's or a subset. `tokens_RC` holds ids by position: the
    prompt's and the committed ones up to `position_R`, the newest. All else is `UNKNOWN`, the
    shared prefix included. `hidden_RD` is the residual stream that the newest token was sampled
    from. `page_table_RM` names KV pages, which hold all positions before `position_R`.
    """

    row_R: torch.Tensor
    tokens_RC: torch.Tensor
    position_R: torch.Tensor
    hidden_RD: torch.Tensor
    page_table_RM: torch.Tensor


class Proposer(Protocol):
    """Proposes draft tokens on the device, before the host has read the newest token.

    A wrong draft token costs time and never changes a result, because only tokens that the model
    samples itself are accepted.
    """

    def propose(self, history: RowHistory, draft_RK: torch.Tensor) -> None:
        """Write up to K draft tokens a row, `UNKNOWN` from the first missing one on.

        Only enqueues work on the compute stream and reads nothing on the host, so the call can be
        captured.
        """
        ...
