"""Rules of a session as a state machine: each frame gets exactly one outcome."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from typing import Generic, Protocol, TypeVar

import msgspec
from legato_engine.client.request_stream import merge_events
from legato_engine.errors import ClientTooSlow, LegatoError, SessionOutOfOrder
from legato_engine.ipc.messages import Done, OutputDelta, PrefillStarted, QueuePosition


class FramePolicy(enum.Enum):
    """Policy for frames that arrive faster than they are processed."""

    LATEST_WINS = enum.auto()
    EVERY_FRAME = enum.auto()
    PREEMPT = enum.auto()


class DropReason(enum.Enum):
    """Reason that a frame was dropped or its tasks were stopped."""

    SUPERSEDED = enum.auto()
    TOO_OLD = enum.auto()
    OVERLOADED = enum.auto()
    CANCELLED = enum.auto()
    GOING_AWAY = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Frame settings of a session.

    `frame_credits` limits the waiting frames, and so those that a client may send before it knows
    their fate. `response_credits` None is unlimited. `max_unsent_frames` limits the frames whose
    results wait for credits. A client that grants none for `credit_timeout` meanwhile is
    disconnected.
    """

    policy: FramePolicy = FramePolicy.LATEST_WINS
    max_in_flight: int = 1
    frame_credits: int = 2
    max_frame_age: float = math.inf
    response_credits: int | None = None
    max_unsent_frames: int = 16
    credit_timeout: float = 30.0


# ---------------------------------------------------------------- frame

Output = QueuePosition | PrefillStarted | OutputDelta
Outcome = Done | LegatoError | None
"""Outcome of a task; None: stopped before it was submitted to the engine."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Frame:
    """State of a frame. Only `SessionCore` changes the last four fields.

    At `captured_at` the frame's age was zero, on the clock of the core's `now`.
    """

    sequence: int
    task_ids: tuple[str, ...]  # at least one; empty ids may repeat
    captured_at: float
    must_run: bool = False

    accepted: bool = dataclasses.field(default=False, init=False)
    stopped: dict[int, DropReason] = dataclasses.field(default_factory=dict, init=False)  # by task
    ended: set[int] = dataclasses.field(default_factory=set, init=False)  # tasks
    num_sent: int = dataclasses.field(default=0, init=False)  # results handed to the writer

    @property
    def may_be_dropped(self) -> bool:
        """Return whether the frame may be dropped: not once a result was sent."""
        return self.num_sent == 0 and not self.must_run


F = TypeVar("F", bound=Frame)


@dataclasses.dataclass(frozen=True, slots=True)
class Accepted:
    """The server has the frame's bytes."""

    sequence: int
    frame_credits: int


@dataclasses.dataclass(frozen=True, slots=True)
class Dropped:
    """The frame gets no results."""

    sequence: int
    reason: DropReason
    frame_credits: int
    dropped_total: int


@dataclasses.dataclass(frozen=True, slots=True)
class GoAwayNotice:
    """The server will end the session."""

    time_left: float  # seconds


@dataclasses.dataclass(frozen=True, slots=True)
class FrameOutput(Generic[F]):
    """An output of task `index`; an `OutputDelta` has one event."""

    frame: F
    index: int
    output: Output


@dataclasses.dataclass(frozen=True, slots=True)
class FrameOutcome(Generic[F]):
    """Outcome of task `index`; `stopped` is set if the session stopped it."""

    frame: F
    index: int
    outcome: Outcome
    stopped: DropReason | None
    last: bool  # of its frame


Notice = Accepted | Dropped | GoAwayNotice
"""Messages that need no credit."""


# ---------------------------------------------------------------- capture clock

_LATE = 0.1  # seconds before the newest capture time from which on a frame may tell of a set clock
_LATE_IN_A_ROW = 3  # a single one was late on its way, or is another camera's


class CaptureClock:
    """Estimator of ages from capture times on the client's clock, in seconds and in order.

    The clock is trusted as long as the least delay so far is at least 0 and below `max_age`.
    Otherwise that delay counts as the difference of the clocks, and ages are relative to it.
    Delays count anew once the clock was set back, by `set_back` seconds in all so far: otherwise
    every later frame would be too old.
    """

    def __init__(self, max_age: float) -> None:
        self._max_age = max_age
        self._least_delay = math.inf
        self._newest = -math.inf
        self._num_late = 0
        self.set_back = 0.0

    def age(self, captured: float, now: float) -> float:
        self._num_late = self._num_late + 1 if captured < self._newest - _LATE else 0
        if self._num_late == _LATE_IN_A_ROW:
            self.set_back += self._newest - captured
            self._least_delay, self._newest, self._num_late = math.inf, captured, 0
        self._newest = max(self._newest, captured)
        delay = now - captured
        self._least_delay = min(self._least_delay, delay)
        if 0 <= self._least_delay < self._max_age:
            return delay
        return delay - self._least_delay

    def captured(self, now: float) -> float:
        """Estimate an unstamped frame's capture time, as if it had arrived as fast as any."""
        return now - self._least_delay if math.isfinite(self._least_delay) else now


# ---------------------------------------------------------------- totals

MAX_AGES = 4096
"""Maximum ages kept for the metrics; the oldest are dropped."""


class SessionTotals:
    """Counts since the start, and the ages in seconds at which frames got their last result."""

    def __init__(self) -> None:
        self.frames = 0
        self.dropped = dict.fromkeys(DropReason, 0)
        self.ages: collections.deque[float] = collections.deque(maxlen=MAX_AGES)


# ---------------------------------------------------------------- send queue


class SendQueue(Generic[F]):
    """Queue of messages: notices first, which need no credit, then results, then events.

    Unless the credits suffice for all events of a task, they are dropped before its result, which
    repeats them. Waiting events are merged, so a task holds at most one answer's worth.
    `num_credits` None is unlimited.
    """

    def __init__(self, num_credits: int | None) -> None:
        self._credits = math.inf if num_credits is None else num_credits
        self._notices: collections.deque[Notice] = collections.deque()
        self._results: collections.deque[tuple[F, int, Outcome]] = collections.deque()
        self._events: dict[tuple[F, int], list[Output]] = {}

    @property
    def is_empty(self) -> bool:
        return not (self._notices or self._results or self._events)

    @property
    def is_starved(self) -> bool:
        return self._credits == 0 and bool(self._results or self._events)

    @property
    def num_notices(self) -> int:
        return len(self._notices)

    def frames(self) -> list[F]:
        """Return the frames, oldest first."""
        return list(dict.fromkeys(frame for frame, _, _ in self._results))

    def grant(self, count: int) -> None:
        self._credits += count

    def lift_limit(self) -> None:
        self._credits = math.inf

    def add_notice(self, notice: Notice) -> None:
        self._notices.append(notice)

    def add_output(self, frame: F, index: int, output: Output) -> None:
        waiting = self._events.setdefault((frame, index), [])
        pieces: list[Output] = [output]
        if isinstance(output, OutputDelta):
            pieces = [msgspec.structs.replace(output, events=(event,)) for event in output.events]
        for piece in pieces:
            _append_merged(waiting, piece)
        if not waiting:
            del self._events[frame, index]

    def add_result(self, frame: F, index: int, outcome: Outcome) -> None:
        self._results.append((frame, index, outcome))

    def remove(self, frame: F) -> None:
        self._results = collections.deque(each for each in self._results if each[0] is not frame)
        for index in range(len(frame.task_ids)):
            self._events.pop((frame, index), None)

    def next(self) -> Notice | FrameOutput[F] | FrameOutcome[F] | None:
        if self._notices:
            return self._notices.popleft()
        if self._credits == 0:
            return None
        if self._results:
            return self._next_of_result()
        if self._events:
            return self._take_event(*next(iter(self._events)))
        return None

    def _next_of_result(self) -> FrameOutput[F] | FrameOutcome[F]:
        frame, index, outcome = self._results[0]
        waiting = self._events.get((frame, index), [])
        if waiting and self._credits > len(waiting):
            return self._take_event(frame, index)
        self._events.pop((frame, index), None)
        self._results.popleft()
        self._credits -= 1
        frame.num_sent += 1
        last = frame.num_sent == len(frame.task_ids)
        return FrameOutcome(frame, index, outcome, frame.stopped.get(index), last)

    def _take_event(self, frame: F, index: int) -> FrameOutput[F]:
        waiting = self._events.pop((frame, index))
        if len(waiting) > 1:
            self._events[frame, index] = waiting[1:]  # moves behind those of other tasks
        self._credits -= 1
        return FrameOutput(frame, index, waiting[0])


def _append_merged(waiting: list[Output], piece: Output) -> None:
    last = waiting[-1] if waiting else None
    if isinstance(last, QueuePosition) and isinstance(piece, QueuePosition):
        waiting[-1] = piece
    elif isinstance(last, OutputDelta) and isinstance(piece, OutputDelta):
        merged = merge_events([*last.events, *piece.events])
        waiting[-1:] = [msgspec.structs.replace(piece, events=(event,)) for event in merged]
    else:
        waiting.append(piece)


# ---------------------------------------------------------------- core

# The core neither waits nor reads a clock; `SessionDriver` reports what happened and when. The core
# orders its `FrameExecutor` at once; messages to the client leave through `next`.

MAX_UNREAD = 4096  # notices; only a client that sends without reading is due more

Frame_contra = TypeVar("Frame_contra", bound=Frame, contravariant=True)


class FrameExecutor(Protocol[Frame_contra]):
    """Runner of frames. It calls `SessionCore`, but never at once."""

    def start(self, frame: Frame_contra) -> None: ...

    def stop(self, frame: Frame_contra, index: int) -> None:
        """End a task with its partial result."""

    def abort(self, frame: Frame_contra) -> None:
        """Abort the frame. Idempotent."""


class SessionCore(Generic[F]):
    """State machine of a session. `now` is seconds on the clock of `Frame.captured_at`.

    A frame is open until its last result or its drop is handed to the writer. It waits (`_queue`),
    runs (`_running`), and has results to send (`_send_queue`), perhaps the last two at a time.
    """

    def __init__(
        self,
        settings: SessionSettings,
        runner: FrameExecutor[F],
        totals: SessionTotals | None = None,
    ) -> None:
        self._settings = settings
        self._runner = runner
        self._totals = SessionTotals() if totals is None else totals
        self._queue: list[F] = []
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
        """Return whether all frames have outcomes and all messages were handed over."""
        return not self._open and self._send_queue.is_empty

    @property
    def is_finished(self) -> bool:
        return self._half_closed and self.is_settled

    def next_wake(self) -> float:
        """Return when to call `next` even if nothing happens; infinity for never."""
        captured = (each.captured_at for each in self._open.values() if each.may_be_dropped)
        oldest = min(captured, default=math.inf) + self._settings.max_frame_age
        if self._starved_since is None:
            return oldest
        return min(oldest, self._starved_since + self._settings.credit_timeout)

    # ------------------------------------------------------------ the client's side

    def receive(self, frame: F, now: float) -> None:
        """Queue, start or drop a frame that arrived.

        Raises:
            SessionOutOfOrder: its sequence number does not increase.
            ClientTooSlow: the client leaves too many notices unread.
        """
        if frame.sequence <= self._last_sequence:
            raise SessionOutOfOrder(
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
        """Drop new frames from now on; earlier ones continue. Idempotent."""
        if not self._going_away:
            self._going_away = True
            self._send_queue.add_notice(GoAwayNotice(time_left))

    def stop_all(self) -> None:
        for frame in list(self._queue):
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

    def next(self, now: float) -> Notice | FrameOutput[F] | FrameOutcome[F] | None:
        """Return the next frame to run; drop those that are too old first.

        Raises:
            ClientTooSlow: messages waited for credits longer than `credit_timeout`.
        """
        for frame in list(self._open.values()):
            if self._is_too_old(frame, now):
                self._drop(frame, DropReason.TOO_OLD)
        message = self._send_queue.next()
        if isinstance(message, FrameOutcome) and message.last:
            del self._open[message.frame.sequence]
            self._totals.ages.append(now - message.frame.captured_at)
        self._check_credits(now)
        self._start_waiting()
        return message

    # ------------------------------------------------------------ the rules

    def _enqueue(self, frame: F) -> None:
        victim = self._victim(frame)
        self._queue.append(frame)
        if victim is not None:
            self._drop(*victim)
        if self._settings.policy is FramePolicy.PREEMPT and frame in self._queue:
            for older in list(self._running):
                if not older.must_run:
                    self._stop(older, DropReason.SUPERSEDED)
        self._start_waiting()

    def _victim(self, frame: F) -> tuple[F, DropReason] | None:
        """Return the frame to drop for a new one, perhaps itself.

        At most `frame_credits` mandatory frames wait. EVERY_FRAME lets so many of both kinds wait
        together; the other policies the newest droppable frame.
        """
        capacity = self._settings.frame_credits
        replaceable = [each for each in self._queue if not each.must_run]
        if self._settings.policy is FramePolicy.EVERY_FRAME:
            if len(self._queue) < capacity:
                return None
            if frame.must_run and replaceable:
                return replaceable[-1], DropReason.OVERLOADED
            return frame, DropReason.OVERLOADED
        if frame.must_run and len(self._queue) - len(replaceable) >= capacity:
            return frame, DropReason.OVERLOADED
        return (replaceable[0], DropReason.SUPERSEDED) if replaceable else None

    def _start_waiting(self) -> None:
        while (
            self._queue
            and len(self._running) < self._settings.max_in_flight
            and not self._is_blocked()
        ):
            frame = self._queue.pop(0)
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
