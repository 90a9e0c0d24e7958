"""Draft proposers: the interface and prompt lookup.

Shape legend: R rows of the device's state, C positions, K draft tokens, D width, M pages.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

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
        ...

    def propose(self, history: RowHistory, draft_RK: torch.Tensor) -> None:
        """Write up to K draft tokens a row, `UNKNOWN` from the first missing one on.

        Only enqueues work on the compute stream and reads nothing on the host: it may be captured.
        """
        ...
