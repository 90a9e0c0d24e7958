"""The rules of a session as a state machine: frames in, one outcome for each out.

It neither waits nor reads a clock: whoever drives it says what happened and what time it is. What
it decides is told to `Workers` at once, and to the client through `next`.
"""

from __future__ import annotations

import collections
import math
from typing import Generic, Protocol, TypeVar

from legato_engine.errors import ClientTooSlow, SessionProtocol

from legato_service.session.frame import (
    Accepted,
    Dropped,
    Event,
    F,
    Frame,
    GoAway,
    Notice,
    Outcome,
    Report,
    Result,
)
from legato_service.session.frame_queue import FrameQueue
from legato_service.session.send_queue import SendQueue
from legato_service.session.terms import Cause, Policy, Terms

MAX_UNREAD = 4096  # notices: more are due only to a client that sends and does not read

Worked_contra = TypeVar("Worked_contra", bound=Frame, contravariant=True)


class Workers(Protocol[Worked_contra]):
    """Who runs frames. Answers through `SessionCore.taken`, `report` and `ended`, never at once."""

    def start(self, frame: Worked_contra) -> None:
        """Take the frame's picture in, and run its tasks."""
        ...

    def stop(self, frame: Worked_contra, index: int) -> None:
        """Have this task end now, with what it has."""
        ...

    def abort(self, frame: Worked_contra) -> None:
        """Forget the frame; what is still said of it is not heard. Harmless when repeated."""
        ...


class SessionCore(Generic[F]):
    """One session. `now` is seconds on the clock that `Frame.born` is read from.

    A frame is open from its arrival to its outcome: its last result, or its drop, handed to the
    writer. It waits, then runs, then its last results wait for the writer; of these stages the
    mailbox, `_running` and the outbox know, and a frame whose tasks ended one by one may be in the
    last two at once.
    """

    def __init__(self, terms: Terms, workers: Workers[F]) -> None:
        self._terms = terms
        self._workers = workers
        self._mailbox: FrameQueue[F] = FrameQueue(terms.policy, terms.frame_credits)
        self._outbox: SendQueue[F] = SendQueue(terms.response_credits)
        self._open: dict[int, F] = {}
        self._running: list[F] = []
        self._last_sequence = -1
        self._going = False
        self._half_closed = False
        self._starved_since: float | None = None
        self.num_frames = 0
        self.num_must_run = 0
        self.dropped: collections.Counter[Cause] = collections.Counter()

    # ------------------------------------------------------------ what can be asked

    @property
    def frame_credits(self) -> int:
        """Frames that a client may have sent without knowing them accepted or dropped."""
        return 0 if self._going else self._terms.frame_credits

    @property
    def is_settled(self) -> bool:
        """Whether every frame had its outcome, and all was handed to the writer."""
        return not self._open and self._outbox.is_empty

    @property
    def is_finished(self) -> bool:
        """Whether the client has said all, and so has this side."""
        return self._half_closed and self.is_settled

    def next_wake(self) -> float:
        """When `next` must be called again although nothing happened; infinity for never."""
        ages = (each.born for each in self._open.values() if each.may_be_dropped)
        oldest = min(ages, default=math.inf) + self._terms.max_frame_age
        if self._starved_since is None:
            return oldest
        return min(oldest, self._starved_since + self._terms.patience)

    # ------------------------------------------------------------ the client's side

    def receive(self, frame: F, now: float) -> None:
        """A frame arrived.

        Raises `SessionProtocol` when its sequence does not grow, and `ClientTooSlow` when too much
        of what it was told before is unread.
        """
        if frame.sequence <= self._last_sequence:
            raise SessionProtocol(
                f"{frame.sequence} is not above {self._last_sequence}", field="frame.stamp.sequence"
            )
        if self._outbox.num_notices >= MAX_UNREAD:
            raise ClientTooSlow(f"{MAX_UNREAD} messages are unread", limit=MAX_UNREAD)
        self._last_sequence = frame.sequence
        self.num_frames += 1
        self.num_must_run += frame.must_run
        self._open[frame.sequence] = frame
        if self._going:
            self._drop(frame, Cause.GOING_AWAY)
        elif self._is_too_old(frame, now):
            self._drop(frame, Cause.TOO_OLD)
        else:
            self._let_in(frame)

    def cancel(self, sequence: int) -> None:
        """The client wants no more of this frame."""
        frame = self._open.get(sequence)
        if frame is None:
            return
        if frame in self._mailbox:
            self._drop(frame, Cause.CANCELLED)
        else:
            self._stop(frame, Cause.CANCELLED)

    def cancel_task(self, task_id: str) -> None:
        """The client wants no more of the running tasks of this id; an empty one names none."""
        for frame in list(self._running) if task_id else []:
            for index, name in enumerate(frame.task_ids):
                if name == task_id:
                    self._stop_task(frame, index, Cause.CANCELLED)

    def grant(self, count: int) -> None:
        """The client is ready for more results and events."""
        self._outbox.grant(count)
        self._starved_since = None

    def half_close(self) -> None:
        """The client will say no more, so it cannot grant credits either: none are needed now."""
        self._half_closed = True
        self._outbox.lift()

    # ------------------------------------------------------------ the workers' side

    def taken(self, frame: F) -> None:
        """The frame's bytes are the server's own now; a result that was told says so too."""
        if self._is_open(frame) and not frame.accepted and frame.told == 0:
            frame.accepted = True
            self._outbox.say(Accepted(frame.sequence, self.frame_credits))

    def report(self, frame: F, index: int, report: Report) -> None:
        """A running task said something on its way."""
        if self._is_open(frame) and index not in frame.ended:
            self._outbox.add_report(frame, index, report)

    def ended(self, frame: F, index: int, outcome: Outcome) -> None:
        """A task ended. Each must; only the first time counts."""
        if not self._is_open(frame) or index in frame.ended:
            return
        frame.ended.add(index)
        self._outbox.add_result(frame, index, outcome)
        if len(frame.ended) == len(frame.task_ids):
            self._running.remove(frame)
        self._bound_ring()
        self._start_waiting()

    # ------------------------------------------------------------ the server's side

    def go_away(self, time_left: float) -> None:
        """Take no frames from now on; those that came before go on. Idempotent."""
        if not self._going:
            self._going = True
            self._outbox.say(GoAway(time_left))

    def wind_up(self) -> None:
        """The time is over: what runs ends with what it has, what waits does not run."""
        for frame in self._mailbox:
            self._drop(frame, Cause.GOING_AWAY)
        for frame in list(self._running):
            self._stop(frame, Cause.CANCELLED)

    def cut(self) -> None:
        """Give every open frame its outcome at once; nothing is waited for after this."""
        self.wind_up()
        self._outbox.lift()
        for frame in list(self._running):
            self._workers.abort(frame)
            for index in range(len(frame.task_ids)):
                self.ended(frame, index, None)

    # ------------------------------------------------------------ the writer's side

    def next(self, now: float) -> Notice | Event[F] | Result[F] | None:
        """The next message to send, if any; no result leaves when its frame is too old.

        Raises `ClientTooSlow` when the client was out of credits for too long.
        """
        for frame in list(self._open.values()):
            if self._is_too_old(frame, now):
                self._drop(frame, Cause.TOO_OLD)
        message = self._outbox.next()
        if isinstance(message, Result) and message.last:
            del self._open[message.frame.sequence]
        self._mind_credits(now)
        self._start_waiting()
        return message

    # ------------------------------------------------------------ the rules

    def _let_in(self, frame: F) -> None:
        victim = self._mailbox.put(frame)
        if victim is not None:
            self._drop(*victim)
        if self._terms.policy is Policy.PREEMPT and frame in self._mailbox:
            for older in list(self._running):
                if not older.must_run:
                    self._stop(older, Cause.SUPERSEDED)
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Start frames while there is room for them, and for their results."""
        while (
            len(self._mailbox) > 0
            and len(self._running) < self._terms.max_in_flight
            and not self._is_clogged()
        ):
            frame = self._mailbox.take()
            self._running.append(frame)
            self._workers.start(frame)

    def _is_clogged(self) -> bool:
        """Whether as many frames as may wait for the reader cannot be dropped for another."""
        kept = [each for each in self._outbox.frames() if not each.may_be_dropped]
        return len(kept) >= self._terms.ring

    def _bound_ring(self) -> None:
        waiting = self._outbox.frames()
        if len(waiting) > self._terms.ring:
            droppable = (each for each in waiting if each.may_be_dropped)
            victim = next(droppable, None)
            if victim is not None:
                self._drop(victim, Cause.OVERLOADED)

    def _drop(self, frame: F, cause: Cause) -> None:
        """The frame's one outcome, wherever it is by now."""
        del self._open[frame.sequence]
        if frame in self._mailbox:
            self._mailbox.remove(frame)
        if frame in self._running:
            self._running.remove(frame)
            self._workers.abort(frame)
        self._outbox.remove(frame)
        self.dropped[cause] += 1
        total = self.dropped.total()
        self._outbox.say(Dropped(frame.sequence, cause, self.frame_credits, total))

    def _stop(self, frame: F, cause: Cause) -> None:
        for index in range(len(frame.task_ids)):
            self._stop_task(frame, index, cause)

    def _stop_task(self, frame: F, index: int, cause: Cause) -> None:
        if index not in frame.ended and index not in frame.stopped:
            frame.stopped[index] = cause
            self._workers.stop(frame, index)

    def _is_open(self, frame: F) -> bool:
        return self._open.get(frame.sequence) is frame

    def _is_too_old(self, frame: F, now: float) -> bool:
        return frame.may_be_dropped and now - frame.born >= self._terms.max_frame_age

    def _mind_credits(self, now: float) -> None:
        if not self._outbox.is_starved:
            self._starved_since = None
        elif self._starved_since is None:
            self._starved_since = now
        elif now - self._starved_since >= self._terms.patience:
            raise ClientTooSlow(
                f"nothing was granted for {self._terms.patience:g} s while answers waited",
                limit_ms=round(self._terms.patience * 1000),
            )
