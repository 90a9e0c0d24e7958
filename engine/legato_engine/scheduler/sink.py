"""The receiver of results."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from legato_engine.core.events import Event
from legato_engine.core.results import FinishReason
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

    def delta(self, sequence: Sequence, events: Many[Event]) -> None: ...

    def done(self, sequence: Sequence, finish_reason: FinishReason) -> None: ...

    def failed(self, sequence: Sequence, error: LegatoError) -> None: ...


class SilentSink:
    """Ignores events and raises failures."""

    def started(self, sequence: Sequence) -> None:
        pass

    def delta(self, sequence: Sequence, events: Many[Event]) -> None:
        pass

    def done(self, sequence: Sequence, finish_reason: FinishReason) -> None:
        pass

    def failed(self, sequence: Sequence, error: LegatoError) -> None:
        raise error
