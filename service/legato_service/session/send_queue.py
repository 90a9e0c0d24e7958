"""The messages that a session has to send, within the client's credits."""

from __future__ import annotations

import collections
from typing import Generic

import msgspec
from legato_engine.client.request_stream import merge_events
from legato_engine.ipc.messages import Delta, Queued

from legato_service.session.frame import Event, F, Notice, Outcome, Output, Result


class SendQueue(Generic[F]):
    """Orders messages: notices first, which need no credit, then results, then events.

    A task's events precede its result if the credits suffice for all of them; otherwise they are
    dropped, because the result repeats them. Waiting events are merged, so a task holds at most
    one answer's worth. `num_credits` None is unlimited.
    """

    def __init__(self, num_credits: int | None) -> None:
        self._credits = num_credits
        self._notices: collections.deque[Notice] = collections.deque()
        self._results: collections.deque[tuple[F, int, Outcome]] = collections.deque()
        self._events: dict[tuple[F, int], list[Output]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no message waits."""
        return not (self._notices or self._results or self._events)

    @property
    def is_starved(self) -> bool:
        """Whether a message waits for credits."""
        return self._credits == 0 and bool(self._results or self._events)

    @property
    def num_notices(self) -> int:
        """Notices that wait for the writer."""
        return len(self._notices)

    def frames(self) -> list[F]:
        """Return the frames with waiting results, oldest first."""
        return list(dict.fromkeys(frame for frame, _, _ in self._results))

    def grant(self, count: int) -> None:
        """Add credits."""
        if self._credits is not None:
            self._credits += count

    def lift_limit(self) -> None:
        """Need no credits from now on."""
        self._credits = None

    def add_notice(self, notice: Notice) -> None:
        """Append a notice."""
        self._notices.append(notice)

    def add_output(self, frame: F, index: int, output: Output) -> None:
        """Append an output of a running task."""
        waiting = self._events.setdefault((frame, index), [])
        pieces: list[Output] = [output]
        if isinstance(output, Delta):
            pieces = [msgspec.structs.replace(output, events=(event,)) for event in output.events]
        for piece in pieces:
            _append_merged(waiting, piece)
        if not waiting:
            del self._events[frame, index]

    def add_result(self, frame: F, index: int, outcome: Outcome) -> None:
        """Append the outcome of a task."""
        self._results.append((frame, index, outcome))

    def remove(self, frame: F) -> None:
        """Remove the frame's results and events."""
        self._results = collections.deque(each for each in self._results if each[0] is not frame)
        for index in range(len(frame.task_ids)):
            self._events.pop((frame, index), None)

    def next(self) -> Notice | Event[F] | Result[F] | None:
        """Remove and return the next message; None without one, or without a credit for it."""
        if self._notices:
            return self._notices.popleft()
        if self._credits == 0:
            return None
        if self._results:
            return self._next_of_result()
        if self._events:
            return self._take_event(*next(iter(self._events)))
        return None

    def _next_of_result(self) -> Event[F] | Result[F]:
        frame, index, outcome = self._results[0]
        waiting = self._events.get((frame, index), [])
        if waiting and (self._credits is None or self._credits > len(waiting)):
            return self._take_event(frame, index)
        self._events.pop((frame, index), None)
        self._results.popleft()
        self._spend_credit()
        frame.num_sent += 1
        last = frame.num_sent == len(frame.task_ids)
        return Result(frame, index, outcome, frame.stopped.get(index), last)

    def _take_event(self, frame: F, index: int) -> Event[F]:
        waiting = self._events.pop((frame, index))
        if len(waiting) > 1:
            self._events[frame, index] = waiting[1:]  # now after those of other tasks
        self._spend_credit()
        return Event(frame, index, waiting[0])

    def _spend_credit(self) -> None:
        if self._credits is not None:
            self._credits -= 1


def _append_merged(waiting: list[Output], piece: Output) -> None:
    last = waiting[-1] if waiting else None
    if isinstance(last, Queued) and isinstance(piece, Queued):
        waiting[-1] = piece
    elif isinstance(last, Delta) and isinstance(piece, Delta):
        merged = merge_events([*last.events, *piece.events])
        waiting[-1:] = [msgspec.structs.replace(piece, events=(event,)) for event in merged]
    else:
        waiting.append(piece)
