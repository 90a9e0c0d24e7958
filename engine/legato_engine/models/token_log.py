"""Sampled tokens as requests may ask for them."""

from __future__ import annotations

import codecs

from legato_engine.core.tokens import Alternative, TokenInfo
from legato_engine.models.detokenizer import Pieces
from legato_engine.tasks import SampledToken


class TokenLog:
    """Describes each token of a sequence, in order, by its text or its value.

    Log-probabilities and alternatives that the request does not want are dropped, because a launch
    computes them for all of its rows. `coord` and `size`: the ids that carry values.
    """

    def __init__(
        self,
        pieces: Pieces,
        *,
        logprobs: bool,
        top_logprobs: int = 0,
        coord: int | None = None,
        size: int | None = None,
    ) -> None:
        self._pieces = pieces
        self._logprobs = logprobs
        self._top_logprobs = top_logprobs
        self._coord = coord
        self._size = size
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    def read(self, token: SampledToken) -> TokenInfo:
        """The text is what the token completes, shown or not."""
        alternatives = self._alternatives(token) if self._top_logprobs else ()
        piece = self._pieces.piece(token.token_id)
        return TokenInfo(
            token_id=token.token_id,
            text=self._decoder.decode(piece),
            logprob=token.logprob if self._logprobs else None,
            coordinate=token.payload[0] if token.token_id == self._coord else None,
            size=token.payload if token.token_id == self._size else None,
            certainty=token.certainty if self._tells_certainty(token) else None,
            alternatives=alternatives,
            piece=piece,
        )

    def _tells_certainty(self, token: SampledToken) -> bool:
        return self._logprobs and token.token_id in (self._coord, self._size)

    def _alternatives(self, token: SampledToken) -> tuple[Alternative, ...]:
        """Each with the text that it would have completed."""
        state = self._decoder.getstate()
        told = []
        for token_id, logprob in token.alternatives[: self._top_logprobs]:
            self._decoder.setstate(state)
            piece = self._pieces.piece(token_id)
            text = self._decoder.decode(piece)
            told.append(Alternative(token_id=token_id, text=text, logprob=logprob, piece=piece))
        self._decoder.setstate(state)
        return tuple(told)
