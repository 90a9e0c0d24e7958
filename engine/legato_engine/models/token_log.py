"""Sampled tokens as requests may ask for them."""

from __future__ import annotations

import codecs

from legato_engine.core import TokenInfo
from legato_engine.models.detokenizer import Pieces
from legato_engine.tasks import SampledToken


class TokenLog:
    """Describes each token of a sequence, in order, by its text or its value.

    Without `logprobs` log-probabilities are dropped, because a launch computes them for all of its
    rows. `coord` and `size`: the ids that carry values.
    """

    def __init__(
        self, pieces: Pieces, *, logprobs: bool, coord: int | None = None, size: int | None = None
    ) -> None:
        self._pieces = pieces
        self._logprobs = logprobs
        self._coord = coord
        self._size = size
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    def read(self, token: SampledToken) -> TokenInfo:
        """The text is what the token completes, shown or not."""
        return TokenInfo(
            token_id=token.token_id,
            text=self._decoder.decode(self._pieces.piece(token.token_id)),
            logprob=token.logprob if self._logprobs else None,
            coordinate=token.payload[0] if token.token_id == self._coord else None,
            size=token.payload if token.token_id == self._size else None,
        )
