"""The scheduler's interface to a model's skills."""

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
    """The device's choice for one row."""

    token_id: int  # -1 if the row's logits were not finite
    payload: tuple[float, float]  # opaque to all but the model
    logprob: float | None = None  # None if no row of the batch requested it
    certainty: Certainty | None = None  # None unless a row of the batch has a task with payloads
    alternatives: tuple[tuple[int, float], ...] = ()
    """Likeliest tokens and their logprobs, in falling order; empty if no row requested any."""


class Task(Protocol):
    """A state machine that turns a request's committed tokens into events.

    If `constrained`, the constraint depends on committed tokens, so sampling waits for the previous
    commit. Otherwise it never changes, and sampling may run a step ahead. With `follows_table` each
    constraint is the `successor` of the one before, so that a device needs no host for it.
    """

    prompt: tuple[PromptToken, ...]  # after the shared prefix (BOS and image, or BOS alone)
    sampling: SamplingParams  # resolved: no field is None except top_k
    max_tokens: int  # including the terminal token
    constrained: bool
    follows_table: bool
    has_payload: bool

    def constraint(self) -> int:
        """Index into the model's constraint table."""
        ...

    def consume(self, token: SampledToken) -> Sequence[Event]:
        """Process a committed token; not called after `finish_reason` is set."""
        ...

    @property
    def finish_reason(self) -> FinishReason | None: ...

    def result(self, finish_reason: FinishReason) -> TaskResult:
        """The result so far, pending text included."""
        ...

    @property
    def reasoning_tokens(self) -> int: ...


class Constraint(NamedTuple):
    """The tokens that a row may sample: `allowed` (None: all) minus `suppressed`.

    After token `on` (None: any) comes constraint `then` (None: the same).
    """

    allowed: tuple[int, ...] | None = None
    suppressed: tuple[int, ...] = ()
    then: int | None = None
    on: int | None = None


def successor(constraints: Sequence[Constraint], constraint: int, token_id: int) -> int:
    """The constraint after a token that was sampled under `constraint`."""
    of = constraints[constraint]
    return constraint if of.then is None or of.on not in (None, token_id) else of.then


def with_token(events: Sequence[Event], token: TokenInfo) -> list[Event]:
    """Attach the token to the first event if that is text, else put it before the events."""
    if events and isinstance(first := events[0], TextDelta | ReasoningDelta):
        return [msgspec.structs.replace(first, tokens=(token,)), *events[1:]]
    return [TokensDelta(tokens=(token,)), *events]


def tokens_of(events: Iterable[Event]) -> Iterator[TokenInfo]:
    for event in events:
        if isinstance(event, TextDelta | ReasoningDelta | TokensDelta):
            yield from event.tokens
