"""The rules of a session as a state machine: each frame gets exactly one outcome.

The core neither waits nor reads a clock; `Session` reports what happened and when. The core orders
its `Runner` at once; messages to the client leave through `next`.
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
    Output,
    Result,
)
from legato_service.session.frame_queue import FrameQueue
from legato_service.session.send_queue import SendQueue
from legato_service.session.settings import DropReason, FramePolicy, SessionSettings
from legato_service.session.totals import SessionTotals

MAX_UNREAD = 4096  # notices; only a client that sends without reading is due more

Frame_contra = TypeVar("Frame_contra", bound=Frame, contravariant=True)


class Runner(Protocol[Frame_contra]):
    """Runs frames. Calls `SessionCore`, but never at once."""

    def start(self, frame: Frame_contra) -> None: ...

    def stop(self, frame: Frame_contra, index: int) -> None:
        """End a task with its partial result."""
        ...

    def abort(self, frame: Frame_contra) -> None:
        """Idempotent."""
        ...


class SessionCore(Generic[F]):
    """One session. `now` is seconds on the clock of `Frame.captured_at`.

    A frame is open until its last result or its drop is handed to the writer. It waits (`_queue`),
    runs (`_running`), and has results to send (`_send_queue`), perhaps the last two at a time.
    """

    def __init__(
        self, settings: SessionSettings, runner: Runner[F], totals: SessionTotals | None = None
    ) -> None:
        self._settings = settings
        self._runner = runner
        self._totals = SessionTotals() if totals is None else totals
        self._queue: FrameQueue[F] = FrameQueue(settings.policy, settings.frame_credits)
        self._send_queue: SendQueue[F] = SendQueue(settings.response_credits)
        self._open: dict[int, F] = {}
        self._running: list[F] = []
        self._last_sequence = -1
        self._going_away = False
        self._half_closed = False
        self._starved_since: float | None = None
        self.num_frames = 0
        self.num_must_run = 0
        self.dropped: collections.Counter[DropReason] = collections.Counter()

    # ------------------------------------------------------------ state

    @property
    def frame_credits(self) -> int:
        return 0 if self._going_away else self._settings.frame_credits

    @property
    def waits_for_credits(self) -> bool:
        return self._starved_since is not None

    @property
    def is_settled(self) -> bool:
        """All frames have outcomes and all messages were handed over."""
        return not self._open and self._send_queue.is_empty

    @property
    def is_finished(self) -> bool:
        return self._half_closed and self.is_settled

    def next_wake(self) -> float:
        """When to call `next` even if nothing happens; infinity for never."""
        captured = (each.captured_at for each in self._open.values() if each.may_be_dropped)
        oldest = min(captured, default=math.inf) + self._settings.max_frame_age
        if self._starved_since is None:
            return oldest
        return min(oldest, self._starved_since + self._settings.credit_timeout)

    # ------------------------------------------------------------ the client's side

    def receive(self, frame: F, now: float) -> None:
        """Queue, start or drop a frame that arrived.

        Raises:
            SessionProtocol: its sequence number does not increase.
            ClientTooSlow: the client leaves too many notices unread.
        """
        if frame.sequence <= self._last_sequence:
            raise SessionProtocol(
                f"{frame.sequence} is not above the last one, {self._last_sequence}",
                field="frame.stamp.sequence",
            )
        if self._send_queue.num_notices >= MAX_UNREAD:
            raise ClientTooSlow(
                f"{MAX_UNREAD} messages are unread, which is the limit", limit=MAX_UNREAD
            )
        self._last_sequence = frame.sequence
        self.num_frames += 1
        self._totals.frames += 1
        self.num_must_run += frame.must_run
        self._open[frame.sequence] = frame
        if self._going_away:
            self._drop(frame, DropReason.GOING_AWAY)
        elif self._is_too_old(frame, now):
            self._drop(frame, DropReason.TOO_OLD)
        else:
            self._enqueue(frame)

    def cancel(self, sequence: int) -> None:
        frame = self._open.get(sequence)
        if frame is None:
            return
        if frame in self._queue:
            self._drop(frame, DropReason.CANCELLED)
        else:
            self._stop(frame, DropReason.CANCELLED)

    def cancel_task(self, task_id: str) -> None:
        """Stop running tasks; an empty id matches none."""
        for frame in list(self._running) if task_id else []:
            for index, name in enumerate(frame.task_ids):
                if name == task_id:
                    self._stop_task(frame, index, DropReason.CANCELLED)

    def grant(self, count: int) -> None:
        self._send_queue.grant(count)
        self._starved_since = None

    def half_close(self) -> None:
        """Need no more credits: the client cannot grant any."""
        self._half_closed = True
        self._send_queue.lift_limit()

    # ------------------------------------------------------------ the runner's side

    def image_ready(self, frame: F) -> None:
        """Accept the frame, unless a result that was sent implies it."""
        if self._is_open(frame) and not frame.accepted and frame.num_sent == 0:
            frame.accepted = True
            self._send_queue.add_notice(Accepted(frame.sequence, self.frame_credits))

    def output(self, frame: F, index: int, output: Output) -> None:
        if self._is_open(frame) and index not in frame.ended:
            self._send_queue.add_output(frame, index, output)

    def ended(self, frame: F, index: int, outcome: Outcome) -> None:
        """Send the outcome of a task, unless it has one. Every task must end."""
        if not self._is_open(frame) or index in frame.ended:
            return
        frame.ended.add(index)
        self._send_queue.add_result(frame, index, outcome)
        if len(frame.ended) == len(frame.task_ids):
            self._running.remove(frame)
        self._limit_unsent()
        self._start_waiting()

    # ------------------------------------------------------------ the server's side

    def go_away(self, time_left: float) -> None:
        """Drop new frames from now on; earlier ones go on. Idempotent."""
        if not self._going_away:
            self._going_away = True
            self._send_queue.add_notice(GoAway(time_left))

    def stop_all(self) -> None:
        for frame in self._queue:
            self._drop(frame, DropReason.GOING_AWAY)
        for frame in list(self._running):
            self._stop(frame, DropReason.CANCELLED)

    def end_all(self) -> None:
        """Give every open frame its outcome now."""
        self.stop_all()
        self._send_queue.lift_limit()
        for frame in list(self._running):
            self._runner.abort(frame)
            for index in range(len(frame.task_ids)):
                self.ended(frame, index, None)

    # ------------------------------------------------------------ the writer's side

    def next(self, now: float) -> Notice | Event[F] | Result[F] | None:
        """Frames that are too old are dropped first.

        Raises:
            ClientTooSlow: messages waited for credits longer than `credit_timeout`.
        """
        for frame in list(self._open.values()):
            if self._is_too_old(frame, now):
                self._drop(frame, DropReason.TOO_OLD)
        message = self._send_queue.next()
        if isinstance(message, Result) and message.last:
            del self._open[message.frame.sequence]
            self._totals.ages.append(now - message.frame.captured_at)
        self._check_credits(now)
        self._start_waiting()
        return message

    # ------------------------------------------------------------ the rules

    def _enqueue(self, frame: F) -> None:
        victim = self._queue.put(frame)
        if victim is not None:
            self._drop(*victim)
        if self._settings.policy is FramePolicy.PREEMPT and frame in self._queue:
            for older in list(self._running):
                if not older.must_run:
                    self._stop(older, DropReason.SUPERSEDED)
        self._start_waiting()

    def _start_waiting(self) -> None:
        while (
            len(self._queue) > 0
            and len(self._running) < self._settings.max_in_flight
            and not self._is_blocked()
        ):
            frame = self._queue.take()
            self._running.append(frame)
            self._runner.start(frame)

    def _is_blocked(self) -> bool:
        kept = [each for each in self._send_queue.frames() if not each.may_be_dropped]
        return len(kept) >= self._settings.max_unsent_frames

    def _limit_unsent(self) -> None:
        waiting = self._send_queue.frames()
        if len(waiting) > self._settings.max_unsent_frames:
            droppable = (each for each in waiting if each.may_be_dropped)
            victim = next(droppable, None)
            if victim is not None:
                self._drop(victim, DropReason.OVERLOADED)

    def _drop(self, frame: F, reason: DropReason) -> None:
        del self._open[frame.sequence]
        if frame in self._queue:
            self._queue.remove(frame)
        if frame in self._running:
            self._running.remove(frame)
            self._runner.abort(frame)
        self._send_queue.remove(frame)
        self.dropped[reason] += 1
        self._totals.dropped[reason] += 1
        total = self.dropped.total()
        self._send_queue.add_notice(Dropped(frame.sequence, reason, self.frame_credits, total))

    def _stop(self, frame: F, reason: DropReason) -> None:
        for index in range(len(frame.task_ids)):
            self._stop_task(frame, index, reason)

    def _stop_task(self, frame: F, index: int, reason: DropReason) -> None:
        if index not in frame.ended and index not in frame.stopped:
            frame.stopped[index] = reason
            self._runner.stop(frame, index)

    def _is_open(self, frame: F) -> bool:
        return self._open.get(frame.sequence) is frame

    def _is_too_old(self, frame: F, now: float) -> bool:
        return frame.may_be_dropped and now - frame.captured_at >= self._settings.max_frame_age

    def _check_credits(self, now: float) -> None:
        if not self._send_queue.is_starved:
            self._starved_since = None
        elif self._starved_since is None:
            self._starved_since = now
        elif now - self._starved_since >= self._settings.credit_timeout:
            raise ClientTooSlow(
                f"no credit was granted for {self._settings.credit_timeout:g} s",
                limit_ms=round(self._settings.credit_timeout * 1000),
            )
