"""A proposer of known quality, for tests and benchmarks.

Shape legend: R rows, C positions, K proposed tokens, N known histories, G groups of F histories.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from legato_engine.config import MAX_BLOCK_SIZE
from legato_engine.core import PromptToken
from legato_engine.speculative.proposer import UNKNOWN, RowHistory

_NOBODY = -2  # in place of every token of a sequence that nobody is like
_FIFTHS = 5  # rates of 0.2, 0.4, ... are met exactly


def known_history(
    prefix_length: int, prompt: Sequence[PromptToken], tokens: Sequence[int]
) -> list[int]:
    """What `RowHistory` holds of a sequence that has sampled `tokens`."""
    return [UNKNOWN] * prefix_length + [token.token_id for token in prompt] + list(tokens)


class OracleProposer:
    """Knows whole sequences beforehand and says each next token right with its rate's probability.

    A row is recognised by what it holds so far: it gets the first known sequence that begins like
    it, and no proposal if none does. Whether a token is said right is drawn once for its place, so
    it depends neither on blocks nor on who asks; a wrong one is the id above.

    A sequence's draws are independent of each other, and each is right with its rate's probability,
    so what is expected of a sequence is what theory says: `(1 - a ** (g + 1)) / (1 - a)` tokens a
    verify of g tokens at a rate of a. But sequences share the luck of a place evenly: of every five
    each has another fifth of it, and those five are alike in whether a block of one token tries
    that place or has it for nothing. So the share that many of them accept of the tokens tried is
    nearer to the rate than as many independent draws would be, above all if they are a multiple of
    five and rates are fifths.
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
        count, self._length = max(room[0], len(known)), max(room[1], *map(len, known))
        shape = (
            count + 1,
            self._length + MAX_BLOCK_SIZE,
        )  # the last is like every row, and is silent
        self._vocab_size = vocab_size
        self._seed = seed
        self._known_NC = torch.full(shape, UNKNOWN, device=device)
        self._said_NC = torch.full(shape, UNKNOWN, device=device)
        self._place_C = torch.arange(shape[1], device=device)
        self._is_any_NC = torch.zeros(shape, dtype=torch.bool, device=device)
        self._is_any_NC[-1] = True
        self.know(known, rates=rates)

    def know(self, known: Sequence[Sequence[int]], *, rates: Sequence[float]) -> None:
        """Know these from now on, as `known_history` gives them, where the others were.

        There is a rate for each, or one for all.
        """
        rows = [[*tokens, *[UNKNOWN] * (self._length - len(tokens))] for tokens in known]
        known_NC = torch.tensor(rows)
        rates_N = np.broadcast_to(np.asarray(rates, float), len(known))
        right_NC = torch.zeros(known_NC.shape, dtype=torch.bool)
        longest = max(map(len, known))
        right_NC[:, :longest] = torch.from_numpy(_right(rates_N, longest, self._seed))
        said_NC = torch.where(right_NC, known_NC, (known_NC + 1) % self._vocab_size)
        said_NC.masked_fill_(known_NC == UNKNOWN, UNKNOWN)
        here = (slice(len(known)), slice(self._length))
        self._known_NC.fill_(_NOBODY)
        self._known_NC[here] = known_NC.to(self._known_NC.device)
        self._said_NC.fill_(UNKNOWN)
        self._said_NC[here] = said_NC.to(self._said_NC.device)

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, C] each, where `know` writes: what it recognises, and what it says of each place.

        The last sequence is like every row, and nothing is said of it.
        """
        return self._known_NC, self._said_NC

    def propose(self, history: RowHistory, draft_RK: torch.Tensor) -> None:
        """See `proposer.Proposer`."""
        length = min(self._known_NC.shape[1], history.tokens_RC.shape[1])
        newest_R1 = history.position_R[:, None]
        behind_R1C = (self._place_C[:length] > newest_R1)[:, None]
        same_RNC = history.tokens_RC[:, None, :length] == self._known_NC[None, :, :length]
        like_RN = (same_RNC | behind_R1C | self._is_any_NC[:, :length]).all(-1)
        which_R1 = like_RN.to(torch.uint8).argmax(1, keepdim=True)
        next_RK = newest_R1 + self._place_C[1 : draft_RK.shape[1] + 1]
        last = self._said_NC.shape[1] - 1  # where nothing is said
        draft_RK.copy_(self._said_NC[which_R1, next_RK.clamp(max=last)])


def _right(rates_N: npt.NDArray[np.float64], num_places: int, seed: int) -> npt.NDArray[np.bool_]:
    """[N, C]: whose token of which place is said right.

    Whatever came before, each of the luck of a place is anywhere from 0 to 1 with equal chances, as
    fifths and their parts are dealt at random; so no policy can know it, and none is favoured.
    """
    draw = np.random.default_rng(seed)
    count = len(rates_N)
    num_groups = -(-count // _FIFTHS)
    fifths_GF = np.tile(np.arange(_FIFTHS), (num_groups, 1))
    parts_GF = np.tile(np.arange(num_groups)[:, None], (1, _FIFTHS))
    right_NC = np.zeros((count, num_places), dtype=bool)
    tried_N = np.ones(count, dtype=bool)  # by a block of one
    for place in range(num_places):
        fifth_GF = draw.permuted(fifths_GF, axis=1)
        part_GF = np.take_along_axis(draw.permuted(parts_GF, axis=0), fifth_GF, axis=1)
        within_GF = (part_GF + draw.random(part_GF.shape)) / num_groups
        luck_GF = (fifth_GF + within_GF) / _FIFTHS
        alike_N = np.lexsort((draw.random(count), tried_N))
        right_NC[alike_N, place] = luck_GF.ravel()[:count] < rates_N[alike_N]
        tried_N = ~(tried_N & right_NC[:, place])
    return right_NC
