"""Interface of the scheduler to a model's skills."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from legato_engine.types import (
    Certainty,
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
    """A sampled token of one row."""

    token_id: int  # -1 if the row's logits were not finite
    payload: tuple[float, float]  # opaque to all but the model
    logprob: float | None = None  # None if no row of the batch requested it
    certainty: Certainty | None = None  # None unless a row of the batch has a task with payloads
    alternatives: tuple[tuple[int, float], ...] = ()
    """Likeliest tokens and their logprobs, in descending order; empty if no row requested any."""


class Task(Protocol):
    """State machine that turns a request's committed tokens into events.

    If `constrained`, the constraint depends on committed tokens, so sampling waits for the previous
    commit. Otherwise it never changes, and sampling may run a step ahead. With
    `uses_transition_table` each constraint is the `successor` of the previous one, so the device
    can advance it without the host.
    """

    prompt: tuple[PromptToken, ...]  # after the shared prefix (BOS and image, or BOS alone)
    sampling: SamplingParams  # resolved: no field is None except top_k
    max_tokens: int  # including the terminal token
    constrained: bool
    uses_transition_table: bool
    has_payload: bool

    def constraint(self) -> int:
        """Return an index into the model's constraint table."""
        ...

    def consume(self, token: SampledToken) -> Sequence[Event]:
        """Process a committed token; not called after `finish_reason` is set."""
        ...

    @property
    def finish_reason(self) -> FinishReason | None: ...

    def result(self, finish_reason: FinishReason) -> TaskResult:
        """Return the result so far, including pending text."""
        ...

    @property
    def reasoning_tokens(self) -> int: ...


class Constraint(NamedTuple):
    """Tokens that a row may sample: `allowed` (None: all) minus `suppressed`.

    After token `on` (None: any) comes constraint `then` (None: the same).
    """

    allowed: tuple[int, ...] | None = None
    suppressed: tuple[int, ...] = ()
    then: int | None = None
    on: int | None = None


def successor(constraints: Sequence[Constraint], constraint: int, token_id: int) -> int:
    """Return the constraint that follows when `token_id` was sampled under `constraint`."""
    current = constraints[constraint]
    if current.then is None or current.on not in (None, token_id):
        return constraint
    return current.then


def with_token(events: Sequence[Event], token: TokenInfo) -> list[Event]:
    """Attach the token to the first event if it is text, else insert it before the events."""
    if events and isinstance(first := events[0], TextDelta | ReasoningDelta):
        return [msgspec.structs.replace(first, tokens=(token,)), *events[1:]]
    return [TokensDelta(tokens=(token,)), *events]


def tokens_of(events: Iterable[Event]) -> Iterator[TokenInfo]:
    for event in events:
        if isinstance(event, TextDelta | ReasoningDelta | TokensDelta):
            yield from event.tokens
