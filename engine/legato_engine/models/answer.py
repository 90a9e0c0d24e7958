"""Free text on its way to the caller: stop strings, EOS, and each token's own text."""

from __future__ import annotations

from legato_engine.core import Event, TextDelta, TokenInfo
from legato_engine.models.text_stream import Pieces, TextStream


class Answer:
    """Tokens to `TextDelta`s, with each token's own text if asked for."""

    def __init__(self, tokenizer: Pieces, stop: tuple[str, ...], *, return_tokens: bool) -> None:
        self._stream = TextStream(tokenizer, stop)
        self._return_tokens = return_tokens

    @property
    def text(self) -> str:
        """All text shown so far."""
        return self._stream.text

    @property
    def stopped(self) -> bool:
        """Whether a stop string came."""
        return self._stream.stopped

    def push(self, token_id: int) -> list[Event]:
        """Read a token."""
        text = self._stream.push(token_id)
        if self._return_tokens:
            token = TokenInfo(token_id=token_id, text=self._stream.last_piece)
            return [TextDelta(text=text, tokens=(token,))]
        return [TextDelta(text=text)] if text else []

    def close(self) -> list[Event]:
        """Show what was held back."""
        text = self._stream.close()
        return [TextDelta(text=text)] if text else []
