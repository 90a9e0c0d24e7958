"""Reasoning and its grounding."""

from __future__ import annotations

from legato_engine.core.events import Event, Grounding, ReasoningDelta
from legato_engine.core.geometry import Point
from legato_engine.models.detokenizer import Detokenizer
from legato_engine.models.moondream.config import SpecialTokens
from legato_engine.models.moondream.tokenizer import Tokenizer
from legato_engine.tasks import SampledToken


class ReasoningOutput:
    """Turns tokens into `ReasoningDelta` events.

    A span runs from `ground_start` to `ground_end`. Its coord tokens are pairs of x and y; an
    unpaired last one is dropped, as is a span without points.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: SpecialTokens) -> None:
        self._stream = Detokenizer(tokenizer)
        self._tokens = tokens
        self._span_start: int | None = None
        self._coords: list[float] = []
        self._grounding: list[Grounding] = []

    @property
    def text(self) -> str:
        """Grounding offsets count its characters."""
        return self._stream.text

    @property
    def grounding(self) -> tuple[Grounding, ...]:
        return tuple(self._grounding)

    def push(self, token: SampledToken) -> list[Event]:
        if token.token_id == self._tokens.ground_start:
            self._span_start = len(self.text)
            self._coords = []
        elif token.token_id == self._tokens.ground_end:
            return self._end_span()
        elif token.token_id == self._tokens.coord:
            self._coords.append(token.payload[0])
        elif text := self._stream.push(token.token_id):
            return [ReasoningDelta(text=text)]
        return []

    def _end_span(self) -> list[Event]:
        start, self._span_start = self._span_start, None
        pairs = zip(self._coords[::2], self._coords[1::2], strict=False)
        points = tuple(Point(x=x, y=y) for x, y in pairs)
        if start is None or not points:
            return []
        grounding = Grounding(start_index=start, end_index=len(self.text), points=points)
        self._grounding.append(grounding)
        return [ReasoningDelta(text="", grounding=(grounding,))]
