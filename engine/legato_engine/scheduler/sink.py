"""The scheduler's interface to the receivers of results."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from legato_engine.core import Event, FinishReason
from legato_engine.errors import LegatoError
from legato_engine.sequence import Sequence


class Sink(Protocol):
    """Receives a request's events in order: `started`, `delta`*, then `done` or `failed`.

    A request may fail before it started. An aborted request has no further events. Calls are made
    inside `Scheduler.step` or `stop` and may call `Scheduler.abort`.
    """

    def started(self, sequence: Sequence) -> None:
        """Its prefill, or the first part of its image, was launched."""
        ...

    def delta(self, sequence: Sequence, events: Many[Event]) -> None:
        """A commit added these events, at least one."""
        ...

    def done(self, sequence: Sequence, finish_reason: FinishReason) -> None:
        """Its last token was committed."""
        ...

    def failed(self, sequence: Sequence, error: LegatoError) -> None:
        """It ended without a result."""
        ...


class SilentSink:
    """A `Sink` that ignores events and raises failures."""

    def started(self, sequence: Sequence) -> None:
        """Ignore it."""

    def delta(self, sequence: Sequence, events: Many[Event]) -> None:
        """Ignore it."""

    def done(self, sequence: Sequence, finish_reason: FinishReason) -> None:
        """Ignore it."""

    def failed(self, sequence: Sequence, error: LegatoError) -> None:
        """Raise the error from `Scheduler.step`."""
        raise error
