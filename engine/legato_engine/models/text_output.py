"""Free text on its way to the caller, cut before a stop string."""

from __future__ import annotations

from legato_engine.core import Event, TextDelta
from legato_engine.models.detokenizer import Detokenizer, Pieces


class Answer:
    """Tokens to `TextDelta`s."""

    def __init__(self, tokenizer: Pieces, stop: tuple[str, ...]) -> None:
        self._stream = Detokenizer(tokenizer, stop)

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
        return [TextDelta(text=text)] if text else []

    def close(self) -> list[Event]:
        """Show what was held back."""
        text = self._stream.close()
        return [TextDelta(text=text)] if text else []
