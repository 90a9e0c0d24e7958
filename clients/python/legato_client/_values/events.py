"""What `generate` yields while an answer is being made.

Order: `Queued`* `Started` then deltas, then exactly one `Finished`, which repeats everything, so
that a caller may ignore the deltas. Boxes and points arrive as `Detection` and `PointedObject`.
"""

from __future__ import annotations

from dataclasses import dataclass

from legato_client._values.results import (
    Box,
    Detection,
    Grounding,
    ImageInfo,
    PointedObject,
    Result,
    Token,
)


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits; `position` 0 is next, `estimated_wait` is in seconds."""

    position: int
    estimated_wait: float


@dataclass(frozen=True, slots=True)
class Started:
    """The model began to read; `queue_time` is in seconds."""

    request_id: str
    model: str
    input_tokens: int
    cached_tokens: int
    image: ImageInfo | None
    queue_time: float


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of the answer or caption, never cumulative."""

    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """New reasoning text and the groundings that ended in it."""

    text: str
    grounding: tuple[Grounding, ...] = ()
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class TokensDelta:
    """Tokens that completed no text (values, marks, the last one); with `return_tokens` only."""

    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class OutlineDelta:
    """A piece of outline number `index`: its box first, then pieces of its path."""

    index: int
    path_delta: str = ""
    box: Box | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The whole result; nothing follows."""

    result: Result


Event = (
    Queued
    | Started
    | TextDelta
    | ReasoningDelta
    | Detection
    | PointedObject
    | OutlineDelta
    | TokensDelta
    | Finished
)
