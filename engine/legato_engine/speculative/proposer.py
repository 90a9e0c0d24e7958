"""The seam between a row's known tokens and whoever guesses the next ones.

Shape legend: R rows of the device's state, C positions, K proposed tokens, D width, M pages.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch  # the policies beside this module never load torch

UNKNOWN = -1
"""In place of a token id: none stands here, or none is guessed."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowHistory:
    """Rows as the device knows them, a step ahead of the host; ids are int64.

    `row_R` names them: all of the state's, or those alone that somebody asks about. `tokens_RC`
    holds ids by position, the prompt's and those committed behind it up to `position_R`, the
    newest. All else is `UNKNOWN`: the shared prefix too. `hidden_RD` is the residual stream that
    the newest token was sampled from. `page_table_RM` names the pages of the KV cache, in which the
    model has written what stands before `position_R`.
    """

    row_R: torch.Tensor
    tokens_RC: torch.Tensor
    position_R: torch.Tensor
    hidden_RD: torch.Tensor
    page_table_RM: torch.Tensor


class Proposer(Protocol):
    """Guesses on the device, where the newest token is known before the host has read it.

    A guess costs time when it is wrong and never changes an answer: what stands is what the model
    samples.
    """

    def propose(self, history: RowHistory, draft_RK: torch.Tensor) -> None:
        """Write up to K tokens behind each row's newest, `UNKNOWN` from the first missing one on.

        All these rows at once, by work on the compute stream that reads nothing on the host, so
        that it can be captured.
        """
        ...
