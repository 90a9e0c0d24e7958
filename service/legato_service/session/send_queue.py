"""What a session has to say, and what of it the client's credits allow now."""

from __future__ import annotations

import collections
from typing import Generic

import msgspec
from legato_engine.client.request_stream import merge_events
from legato_engine.ipc.messages import Delta, Queued

from legato_service.session.frame import Event, F, Notice, Outcome, Report, Result


class SendQueue(Generic[F]):
    """Notices go first and free of charge; results go before events of other tasks.

    Events of a task go before its result, unless the credits left do not cover both: the result
    repeats them. Events that wait are joined, so that a task holds at most one answer's worth.
    `credits` None is unlimited.
    """

    def __init__(self, credits_given: int | None) -> None:
        self._credits = credits_given
        self._notices: collections.deque[Notice] = collections.deque()
        self._results: collections.deque[tuple[F, int, Outcome]] = collections.deque()
        self._events: dict[tuple[F, int], list[Report]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not (self._notices or self._results or self._events)

    @property
    def is_starved(self) -> bool:
        """Whether something waits for credits."""
        return self._credits == 0 and bool(self._results or self._events)

    @property
    def num_notices(self) -> int:
        """Notices that wait for the writer."""
        return len(self._notices)

    def frames(self) -> list[F]:
        """The frames that have results waiting, the one that waits longest first."""
        return list(dict.fromkeys(frame for frame, _, _ in self._results))

    def grant(self, count: int) -> None:
        """Allow so many more results and events."""
        if self._credits is not None:
            self._credits += count

    def lift(self) -> None:
        """Need no credits any more."""
        self._credits = None

    def say(self, notice: Notice) -> None:
        """Tell this next."""
        self._notices.append(notice)

    def add_report(self, frame: F, index: int, report: Report) -> None:
        """A running task said something."""
        held = self._events.setdefault((frame, index), [])
        pieces: list[Report] = [report]
        if isinstance(report, Delta):
            pieces = [msgspec.structs.replace(report, events=(event,)) for event in report.events]
        for piece in pieces:
            _join(held, piece)
        if not held:
            del self._events[frame, index]

    def add_result(self, frame: F, index: int, outcome: Outcome) -> None:
        """A task ended."""
        self._results.append((frame, index, outcome))

    def remove(self, frame: F) -> None:
        """Forget what waits of this frame."""
        self._results = collections.deque(each for each in self._results if each[0] is not frame)
        for index in range(len(frame.task_ids)):
            self._events.pop((frame, index), None)

    def next(self) -> Notice | Event[F] | Result[F] | None:
        """The next message, handed over; None when there is none or no credit for it."""
        if self._notices:
            return self._notices.popleft()
        if self._credits == 0:
            return None
        if self._results:
            return self._next_of_result()
        if self._events:
            return self._event(*next(iter(self._events)))
        return None

    def _next_of_result(self) -> Event[F] | Result[F]:
        frame, index, outcome = self._results[0]
        held = self._events.get((frame, index), [])
        if held and (self._credits is None or self._credits > len(held)):
            return self._event(frame, index)
        self._events.pop((frame, index), None)
        self._results.popleft()
        self._spend()
        frame.told += 1
        last = frame.told == len(frame.task_ids)
        return Result(frame, index, outcome, frame.stopped.get(index), last)

    def _event(self, frame: F, index: int) -> Event[F]:
        held = self._events.pop((frame, index))
        if len(held) > 1:
            self._events[frame, index] = held[1:]  # behind those of other tasks
        self._spend()
        return Event(frame, index, held[0])

    def _spend(self) -> None:
        if self._credits is not None:
            self._credits -= 1


def _join(held: list[Report], piece: Report) -> None:
    """Add `piece`, as one with the report before it where they say the same kind of thing."""
    last = held[-1] if held else None
    if isinstance(last, Queued) and isinstance(piece, Queued):
        held[-1] = piece
    elif isinstance(last, Delta) and isinstance(piece, Delta):
        merged = merge_events([*last.events, *piece.events])
        held[-1:] = [msgspec.structs.replace(piece, events=(event,)) for event in merged]
    else:
        held.append(piece)
