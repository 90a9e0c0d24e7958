"""Generated text as events."""

from __future__ import annotations

from legato_engine.core.events import Event, TextDelta
from legato_engine.models.detokenizer import Detokenizer, Pieces


class TextOutput:
    """Turns tokens into `TextDelta` events."""

    def __init__(self, tokenizer: Pieces, stop: tuple[str, ...]) -> None:
        self._stream = Detokenizer(tokenizer, stop)

    @property
    def text(self) -> str:
        return self._stream.text

    @property
    def stopped(self) -> bool:
        return self._stream.stopped

    def push(self, token_id: int) -> list[Event]:
        text = self._stream.push(token_id)
        return [TextDelta(text=text)] if text else []

    def close(self) -> list[Event]:
        text = self._stream.close()
        return [TextDelta(text=text)] if text else []
