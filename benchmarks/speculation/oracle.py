"""A proposer of known quality, for tests and benchmarks.

Shape legend: R rows, C positions, K draft tokens, N known sequences, G groups of F sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from legato_engine.config import MAX_BLOCK_SIZE
from legato_engine.kernels.cuda.module import Module
from legato_engine.kernels.proposer import UNKNOWN, RowHistory
from legato_engine.types import PromptToken

Rate = float | Sequence[float]
_NO_MATCH = -2  # a token that no row has
_FIFTHS = 5  # rates of 0.2, 0.4, ... are met exactly


def known_history(
    prefix_length: int, prompt: Sequence[PromptToken], tokens: Sequence[int]
) -> list[int]:
    """Return the tokens that `RowHistory` has for a sequence that has sampled `tokens`."""
    return [UNKNOWN] * prefix_length + [token.token_id for token in prompt] + list(tokens)


class OracleProposer:
    """Knows whole sequences and drafts each next token right with a given probability.

    A row is matched to the first known sequence that begins like it; without a match nothing is
    proposed. Whether a token is drafted right is drawn once per sequence and position, so it
    depends neither on block sizes nor on the order of calls. A wrong token is the next id.

    A sequence's draws are independent, so it is expected to commit `(1 - a ** (g + 1)) / (1 - a)`
    tokens per verification of g tokens at a rate of a. Across sequences draws are stratified: at
    each position, groups of five sequences get a different fifth of the unit interval each, and the
    five are alike in whether a block of one token would try that position. So the accepted share
    over many sequences is closer to the rate than independent draws would be, above all for
    multiples of five sequences and of rates of 0.2.
    """

    sequential = False

    def __init__(
        self,
        known: Sequence[Sequence[int]],
        device: torch.device,
        *,
        rates: Sequence[Rate],
        vocab_size: int,
        seed: int = 0,
        capacity: tuple[int, int] = (0, 0),
    ) -> None:
        """`capacity` is the most sequences and positions that `know` will be given."""
        count, self._length = max(capacity[0], len(known)), max(capacity[1], *map(len, known))
        shape = count + 1, self._length + MAX_BLOCK_SIZE  # the last matches every row
        self._vocab_size = vocab_size
        self._seed = seed
        self._known_NC = torch.full(shape, UNKNOWN, device=device)
        self._prepared_NC = torch.full(shape, UNKNOWN, device=device)
        self._index_C = torch.arange(shape[1], device=device)
        self._is_any_NC = torch.zeros(shape, dtype=torch.bool, device=device)
        self._is_any_NC[-1] = True
        self.know(known, rates=rates)

    def know(self, known: Sequence[Sequence[int]], *, rates: Sequence[Rate]) -> None:
        """Replace the known sequences, as `known_history` gives them.

        `rates` has one rate per sequence, or one for all; a rate may be a list by position, whose
        last one holds for the rest.
        """
        rows = [[*tokens, *[UNKNOWN] * (self._length - len(tokens))] for tokens in known]
        known_NC = torch.tensor(rows)
        right_NC = torch.zeros(known_NC.shape, dtype=torch.bool)
        longest = max(map(len, known))
        rates_NC = np.array([_by_position(rate, longest) for rate in rates])
        rates_NC = np.broadcast_to(rates_NC, (len(known), longest))
        right_NC[:, :longest] = torch.from_numpy(_right(rates_NC, self._seed))
        prepared_NC = torch.where(right_NC, known_NC, (known_NC + 1) % self._vocab_size)
        prepared_NC.masked_fill_(known_NC == UNKNOWN, UNKNOWN)
        here = (slice(len(known)), slice(self._length))
        self._known_NC.fill_(_NO_MATCH)
        self._known_NC[here] = known_NC.to(self._known_NC.device)
        self._prepared_NC.fill_(UNKNOWN)
        self._prepared_NC[here] = prepared_NC.to(self._prepared_NC.device)

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The known and the prepared tokens, [N, C] each, which `know` writes.

        The last sequence matches every row and has no prepared tokens.
        """
        return self._known_NC, self._prepared_NC

    def propose(self, history: RowHistory, draft_RK: torch.Tensor) -> None:
        """See `Proposer`."""
        length = min(self._known_NC.shape[1], history.tokens_RC.shape[1])
        newest_R1 = history.position_R[:, None]
        later_R1C = (self._index_C[:length] > newest_R1)[:, None]
        same_RNC = history.tokens_RC[:, None, :length] == self._known_NC[None, :, :length]
        matches_RN = (same_RNC | later_R1C | self._is_any_NC[:, :length]).all(-1)
        match_R1 = matches_RN.to(torch.uint8).argmax(1, keepdim=True)
        next_RK = newest_R1 + self._index_C[1 : draft_RK.shape[1] + 1]
        last = self._prepared_NC.shape[1] - 1  # never prepared
        draft_RK.copy_(self._prepared_NC[match_R1, next_RK.clamp(max=last)])


def _by_position(rate: Rate, num_positions: int) -> npt.NDArray[np.float64]:
    given = np.atleast_1d(np.asarray(rate, float))[:num_positions]
    return np.pad(given, (0, num_positions - len(given)), mode="edge")


def _right(rates_NC: npt.NDArray[np.float64], seed: int) -> npt.NDArray[np.bool_]:
    """[N, C]: whether each sequence's token at each position is drafted right.

    Given the past, the draw at each position is uniform over 0 to 1, because strata and the parts
    within them are permuted at random. So no policy can predict it.
    """
    draw = np.random.default_rng(seed)
    count, num_positions = rates_NC.shape
    num_groups = -(-count // _FIFTHS)
    fifths_GF = np.tile(np.arange(_FIFTHS), (num_groups, 1))
    parts_GF = np.tile(np.arange(num_groups)[:, None], (1, _FIFTHS))
    right_NC = np.zeros((count, num_positions), dtype=bool)
    tried_N = np.ones(count, dtype=bool)  # by a block of one token
    for position in range(num_positions):
        fifth_GF = draw.permuted(fifths_GF, axis=1)
        part_GF = np.take_along_axis(draw.permuted(parts_GF, axis=0), fifth_GF, axis=1)
        within_GF = (part_GF + draw.random(part_GF.shape)) / num_groups
        luck_GF = (fifth_GF + within_GF) / _FIFTHS
        alike_N = np.lexsort((draw.random((count,)), tried_N))
        right_NC[alike_N, position] = luck_GF.ravel()[:count] < rates_NC[alike_N, position]
        tried_N = ~(tried_N & right_NC[:, position])
    return right_NC


# ---------------------------------------------------------------- oracle kernel
# The oracle proposer as one CUDA launch.


SOURCE = "oracle.cu"
FOLDER = Path(__file__).parent
_THREADS = 1024


class OracleKernel:
    """An `OracleProposer` on the current GPU, reading that proposer's tables."""

    sequential = False

    def __init__(self, known_NC: torch.Tensor, drafts_NC: torch.Tensor) -> None:
        """Compile the oracle; the tables may change between launches."""
        assert known_NC.is_contiguous(), "a sequence of the table is a row"
        assert drafts_NC.is_contiguous(), "a sequence of the table is a row"
        self._tables = (known_NC, drafts_NC)
        self._oracle = Module(SOURCE, {}, folder=FOLDER).kernel("oracle")

    def propose(self, history: RowHistory, draft_RK: torch.Tensor) -> None:
        """See `Proposer`."""
        (rows, context), (known, length) = history.tokens_RC.shape, self._tables[0].shape
        self._oracle.launch(
            (rows, 1, 1),
            _THREADS,
            [
                *(history.tokens_RC, history.position_R, *self._tables, draft_RK),
                *(context, length, known, draft_RK.stride(0), draft_RK.shape[1]),
            ],
        )
