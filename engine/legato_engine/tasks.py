"""The seam between the scheduler and a model's skills.

A `Task` is a small state machine that turns committed tokens into events. The scheduler asks it
which constraint the next token obeys and hands it what was sampled; it never looks inside.
"""

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
    """What the device sampled for one row.

    `payload` is the value that came with the token, opaque to all but the model. `token_id` -1 says
    that the row's logits were not finite: the sequence fails, its batch mates are untouched.
    `logprob` is as in `core.TokenInfo`; None unless some row of the batch asked.
    """

    token_id: int
    payload: tuple[float, float]
    logprob: float | None = None


class Task(Protocol):
    """One request's skill, from prompt to result.

    `constrained` says that `constraint()` depends on committed tokens: sampling of the next step
    then waits for the commit of the previous one. A free task's constraint never changes, so its
    sampling may run a step ahead.
    """

    prompt: tuple[PromptToken, ...]  # after the shared prefix (BOS and image, or BOS alone)
    sampling: SamplingParams  # resolved: no field is None except top_k
    max_tokens: int  # most tokens this task samples, its terminal token included
    constrained: bool
    has_payload: bool  # the device must compute payloads for this row

    def constraint(self) -> int:
        """Index into the model's constraint table for the next token."""
        ...

    def consume(self, token: SampledToken) -> Sequence[Event]:
        """Advance by one committed token; may set `finish_reason`. Never called after it is set."""
        ...

    @property
    def finish_reason(self) -> FinishReason | None:
        """Set by the token that ended the task."""
        ...

    def result(self, finish_reason: FinishReason) -> TaskResult:
        """The whole result so far, and every pending piece of text flushed into it."""
        ...

    @property
    def reasoning_tokens(self) -> int:
        """Tokens spent before the answer."""
        ...


class Constraint(NamedTuple):
    """Which tokens a row may sample: `allowed` None means all, minus `suppressed`."""

    allowed: tuple[int, ...] | None = None
    suppressed: tuple[int, ...] = ()


def with_token(events: Sequence[Event], token: TokenInfo) -> list[Event]:
    """Add a sampled token to the text it completes, or else as an event of its own before them."""
    if events and isinstance(first := events[0], TextDelta | ReasoningDelta):
        return [msgspec.structs.replace(first, tokens=(token,)), *events[1:]]
    return [TokensDelta(tokens=(token,)), *events]


def tokens_of(events: Iterable[Event]) -> Iterator[TokenInfo]:
    """Yield the tokens in `events`."""
    for event in events:
        if isinstance(event, TextDelta | ReasoningDelta | TokensDelta):
            yield from event.tokens
