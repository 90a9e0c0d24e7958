"""The seam between a row's known tokens and whoever guesses the next ones.

Shape legend: R rows of the device's state, C positions, K proposed tokens.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch  # the policies beside this module never load torch

UNKNOWN = -1
"""In place of a token id: none stands here, or none is guessed."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenHistory:
    """The tokens of all rows as the device knows them, a step ahead of the host; int64.

    `tokens_RC` holds ids by position, the prompt's and those committed behind it up to
    `position_R`, the newest. All else is `UNKNOWN`: the shared prefix too.
    """

    tokens_RC: torch.Tensor
    position_R: torch.Tensor


class Proposer(Protocol):
    """Guesses on the device, where the newest token is known before the host has read it.

    A guess costs time when it is wrong and never changes an answer: what stands is what the model
    samples.
    """

    def propose(self, history: TokenHistory, draft_RK: torch.Tensor) -> None:
        """Write up to K tokens behind each row's newest, `UNKNOWN` from the first missing one on.

        All rows at once, by work on the compute stream that reads nothing on the host, so that it
        can be captured.
        """
        ...
