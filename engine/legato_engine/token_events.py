"""Tokens among the events of a task, for callers who ask for them: each once, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from legato_engine.core import Event, ReasoningDelta, TextDelta, TokenInfo, TokensDelta


def with_token(events: Sequence[Event], token: TokenInfo) -> list[Event]:
    """A token's events with the token itself: beside the text it completes, else in front."""
    if events and isinstance(first := events[0], TextDelta | ReasoningDelta):
        return [msgspec.structs.replace(first, tokens=(token,)), *events[1:]]
    return [TokensDelta(tokens=(token,)), *events]


def tokens_of(events: Iterable[Event]) -> Iterator[TokenInfo]:
    """The tokens that the events tell."""
    for event in events:
        if isinstance(event, TextDelta | ReasoningDelta | TokensDelta):
            yield from event.tokens
