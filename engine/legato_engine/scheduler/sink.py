"""The scheduler's only view of those who wait for results."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from legato_engine.core import Event, FinishReason
from legato_engine.errors import LegatoError
from legato_engine.sequence import Sequence


class Sink(Protocol):
    """Where a request's news goes, in order: `started`, `delta`*, then `done` or `failed`.

    A request may fail before it started; an aborted one is never mentioned again. Calls come from
    inside `Scheduler.step` or `stop`, and may call `Scheduler.abort`.
    """

    def started(self, sequence: Sequence) -> None:
        """Its prefill was launched, or the first part of it."""
        ...

    def delta(self, sequence: Sequence, events: Many[Event]) -> None:
        """One commit added these events, at least one."""
        ...

    def done(self, sequence: Sequence, finish_reason: FinishReason) -> None:
        """Its last token was committed."""
        ...

    def failed(self, sequence: Sequence, error: LegatoError) -> None:
        """It ended without a result."""
        ...


class SilentSink:
    """A `Sink` for requests that nobody waits for; a failure of theirs is raised."""

    def started(self, sequence: Sequence) -> None:
        """Nobody asked."""

    def delta(self, sequence: Sequence, events: Many[Event]) -> None:
        """Nobody asked."""

    def done(self, sequence: Sequence, finish_reason: FinishReason) -> None:
        """Nobody asked."""

    def failed(self, sequence: Sequence, error: LegatoError) -> None:
        """Stop whoever steps the scheduler."""
        raise error
