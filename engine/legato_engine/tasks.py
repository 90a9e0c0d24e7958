"""The interface between the scheduler and a model's skills."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from legato_engine.core import (
    Event,
    FinishReason,
    PromptToken,
    ReasoningDelta,
    SamplingParams,
    TaskResult,
    TextDelta,
    TokenInfo,
    TokensDelta,
)


class SampledToken(NamedTuple):
    """What the device sampled for one row."""

    token_id: int  # -1 if the row's logits were not finite; only its own sequence fails
    payload: tuple[float, float]  # the value of the token, opaque to all but the model
    logprob: float | None = None  # as in `core.TokenInfo`; None if no row of the batch requested it


class Task(Protocol):
    """A state machine that turns the committed tokens of one request into events.

    If `constrained`, the constraint depends on committed tokens, so sampling waits for the previous
    commit. Otherwise it never changes, and sampling may run a step ahead.
    """

    prompt: tuple[PromptToken, ...]  # after the shared prefix (BOS and image, or BOS alone)
    sampling: SamplingParams  # resolved: no field is None except top_k
    max_tokens: int  # including the terminal token
    constrained: bool
    has_payload: bool  # the device must compute payloads for this row

    def constraint(self) -> int:
        """Return the index into the model's constraint table for the next token."""
        ...

    def consume(self, token: SampledToken) -> Sequence[Event]:
        """Process a committed token; not called after `finish_reason` is set."""
        ...

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the task has ended, None before."""
        ...

    def result(self, finish_reason: FinishReason) -> TaskResult:
        """Return the result so far, pending text included."""
        ...

    @property
    def reasoning_tokens(self) -> int:
        """Tokens spent before the answer."""
        ...


class Constraint(NamedTuple):
    """The tokens that a row may sample: `allowed`, or all if it is None, minus `suppressed`."""

    allowed: tuple[int, ...] | None = None
    suppressed: tuple[int, ...] = ()


def with_token(events: Sequence[Event], token: TokenInfo) -> list[Event]:
    """Attach a sampled token to the first event if that is text, else put it before the events."""
    if events and isinstance(first := events[0], TextDelta | ReasoningDelta):
        return [msgspec.structs.replace(first, tokens=(token,)), *events[1:]]
    return [TokensDelta(tokens=(token,)), *events]


def tokens_of(events: Iterable[Event]) -> Iterator[TokenInfo]:
    """Yield the tokens of the events."""
    for event in events:
        if isinstance(event, TextDelta | ReasoningDelta | TokensDelta):
            yield from event.tokens
