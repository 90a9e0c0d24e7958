"""A proposer of known quality, for tests and benchmarks.

Shape legend: R rows, C positions, K proposed tokens, N known histories.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from legato_engine.core import PromptToken
from legato_engine.speculative.proposer import UNKNOWN, TokenHistory

_NOBODY = -2  # in place of every token of a sequence that nobody is like


def known_history(
    prefix_length: int, prompt: Sequence[PromptToken], tokens: Sequence[int]
) -> list[int]:
    """What `TokenHistory` holds of a sequence that has sampled `tokens`."""
    return [UNKNOWN] * prefix_length + [token.token_id for token in prompt] + list(tokens)


class ReplayProposer:
    """Knows whole sequences beforehand and says each next token right with its rate's probability.

    A row is recognised by what it holds so far: it gets the first known sequence that begins like
    it, and no proposal if none does. Whether a token is said right is drawn once for its place, so
    it does not depend on blocks; a wrong one is the id above.
    """

    def __init__(
        self,
        known: Sequence[Sequence[int]],
        device: torch.device,
        *,
        rates: Sequence[float],
        vocab_size: int,
        seed: int = 0,
        room: tuple[int, int] = (0, 0),
    ) -> None:
        """`room` is for how many sequences and positions it may come to `know`, at least these."""
        shape = max(room[0], len(known)), max(room[1], *map(len, known))
        self._vocab_size = vocab_size
        self._seed = seed
        self._known_NC = torch.full(shape, UNKNOWN, device=device)
        self._said_NC = torch.full(shape, UNKNOWN, device=device)
        self.know(known, rates=rates)

    def know(self, known: Sequence[Sequence[int]], *, rates: Sequence[float]) -> None:
        """Know these from now on, as `known_history` gives them, where the others were.

        There is a rate for each, or one for all.
        """
        length = self._known_NC.shape[1]
        rows = [[*tokens, *[UNKNOWN] * (length - len(tokens))] for tokens in known]
        known_NC = torch.tensor(rows)
        luck_NC = torch.rand(known_NC.shape, generator=torch.Generator().manual_seed(self._seed))
        right_NC = luck_NC < torch.tensor(rates)[:, None]
        said_NC = torch.where(right_NC, known_NC, (known_NC + 1) % self._vocab_size)
        self._known_NC.fill_(_NOBODY)
        self._known_NC[: len(known)] = known_NC.to(self._known_NC.device)
        self._said_NC[: len(known)] = said_NC.masked_fill(known_NC == UNKNOWN, UNKNOWN).to(
            self._said_NC.device
        )

    def propose(self, history: TokenHistory, draft_RK: torch.Tensor) -> None:
        """See `proposer.Proposer`."""
        length = min(self._known_NC.shape[1], history.tokens_RC.shape[1])
        place_C = torch.arange(length, device=draft_RK.device)
        behind_R1C = (place_C > history.position_R[:, None])[:, None]
        same_RNC = history.tokens_RC[:, None, :length] == self._known_NC[None, :, :length]
        like_RN = (same_RNC | behind_R1C).all(-1)
        which_R = like_RN.long().argmax(1)
        step_K = torch.arange(1, draft_RK.shape[1] + 1, device=draft_RK.device)
        place_RK = history.position_R[:, None] + step_K
        guess_RK = self._said_NC[which_R[:, None], place_RK.clamp(max=length - 1)]
        unknown_RK = ~like_RN.any(1)[:, None] | (place_RK >= length)
        draft_RK.copy_(guess_RK.masked_fill(unknown_RK, UNKNOWN))
