"""Events of a running request: pieces of its result, in the order of the tokens."""

from __future__ import annotations

from legato_engine.core.geometry import Box, Point
from legato_engine.core.tokens import TokenInfo
from legato_engine.core.value import Value


class TextDelta(Value, frozen=True):
    """New text of an answer or caption."""

    text: str
    tokens: tuple[TokenInfo, ...] = ()


class Grounding(Value, frozen=True):
    """Points of a span of the reasoning, in characters."""

    start_index: int
    end_index: int
    points: tuple[Point, ...] = ()


class ReasoningDelta(Value, frozen=True):
    """New reasoning, and the groundings that end in it."""

    text: str
    grounding: tuple[Grounding, ...] = ()
    tokens: tuple[TokenInfo, ...] = ()


class PointEvent(Value, frozen=True):
    """A completed point."""

    point: Point
    label: str
    confidence: float | None = None


class ObjectEvent(Value, frozen=True):
    """A completed box."""

    box: Box
    label: str
    confidence: float | None = None


class OutlineEvent(Value, frozen=True):
    """A piece of outline `index`: first its box, then text of its path."""

    index: int
    path_delta: str = ""
    box: Box | None = None


class TokensDelta(Value, frozen=True):
    """Tokens without complete text."""

    tokens: tuple[TokenInfo, ...]


Event = TextDelta | ReasoningDelta | PointEvent | ObjectEvent | OutlineEvent | TokensDelta
