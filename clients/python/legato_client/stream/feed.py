"""Frame streaming through sessions, reconnecting as needed."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from legato_client._client import Client
from legato_client._errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    LegatoError,
    ResourceExhausted,
    Unavailable,
)
from legato_client._session.blocking_session import Session
from legato_client._types.results import (
    Detection,
    DetectResult,
    FrameStamp,
    ImageInfo,
    Result,
    TrackNow,
)
from legato_client._types.server import FrameDropped, FrameResult, GoAway
from legato_client._types.tasks import DetectTask, Task, Tracking
from legato_client.stream.frames import Backoff, CapturedFrame, FrameCounters, Mailbox

_CREDIT_POLL_S = 0.2  # poll interval while out of credits
Outcomes = Mapping[str, Result | LegatoError]


class AnsweredFrame:
    """Frame with the outcome of each task, in the tasks' order; `age` is in seconds."""

    __slots__ = ("age", "frame", "image", "outcomes")

    def __init__(
        self, frame: CapturedFrame, outcomes: Outcomes, image: ImageInfo | None, age: float
    ) -> None:
        self.frame = frame
        self.outcomes = outcomes
        self.image = image
        self.age = age


class FeedSession:
    """Session with a thread that reads its answers; another thread sends.

    It `is_leaving` once it should get no more frames, announced by the server if it `was_warned`,
    and `is_over` once it has ended; `take_unanswered` then returns the frames without an outcome.
    `on_change` is called at both. Each session numbers its tracks from 1: those of all but the
    first session get its `number` as a prefix, so that no name is used twice.
    """

    def __init__(
        self,
        session: Session,
        counters: FrameCounters,
        on_answer: Callable[[AnsweredFrame], None],
        on_change: Callable[[], None],
        on_outcome: Callable[[], None],
        *,
        number: int,
    ) -> None:
        """Open the session; `on_outcome` is called at each outcome. Raises LegatoError."""
        self._session = session.__enter__()
        self._counters = counters
        self._on_answer = on_answer
        self._on_change = on_change
        self._on_outcome = on_outcome
        self._track_prefix = f"{number + 1}-" if number else ""
        self._lock = threading.Lock()  # guards the two below
        self._open: dict[int, CapturedFrame] = {}
        self._results: dict[int, dict[str, Result | LegatoError]] = {}
        self._last_sequence = 0
        self.is_leaving = False
        self.was_warned = False
        self.is_over = False
        self.error: LegatoError | None = None
        self._reader = threading.Thread(target=self._read, name="legato-session", daemon=True)
        self._reader.start()

    @property
    def model(self) -> str:
        return self._session.terms.model

    def now(self, at_ns: int) -> tuple[TrackNow, ...]:
        """Predict the tracked objects, as `Session.now`."""
        return tuple(
            dataclasses.replace(track, last=self._named(track.last))
            for track in self._session.now(at_ns)
        )

    def wait_for_room(self) -> bool:
        """Wait a moment for a credit; return whether there is one."""
        try:
            return self._session.wait_for_credit(_CREDIT_POLL_S)
        except LegatoError:
            self.is_leaving = True
            return False

    def send(self, frame: CapturedFrame) -> None:
        """Convert and send a frame. Raises LegatoError if the session takes no more frames."""
        try:
            image = frame.read()
        except (OSError, ValueError):
            self._counters.count("unreadable")
            return
        self._last_sequence += 1
        sequence = self._last_sequence
        with self._lock:  # before it is sent: its answer may come at once
            self._open[sequence] = frame
        stamp = FrameStamp(frame.frame_id, frame.captured_ns, sequence)
        sent = None
        try:
            sent = self._session.send(image, stamp=stamp)
        finally:
            if sent is None:
                with self._lock:
                    self._open.pop(sequence, None)
        self._counters.count("refused" if sent is None else "sent")

    def finish(self) -> None:
        """Stop sending; frames in flight are still answered."""
        self.is_leaving = True
        with contextlib.suppress(LegatoError):  # it has ended already
            self._session.finish()

    def end(self) -> None:
        """End the session now; thread-safe."""
        self._session.close()

    def join(self) -> None:
        """Wait for the session's end."""
        self._reader.join()

    def take_unanswered(self) -> list[CapturedFrame]:
        """Return the unanswered frames in sending order, each once."""
        with self._lock:
            frames = [self._open[sequence] for sequence in sorted(self._open)]
            self._open.clear()
        return frames

    # ------------------------------------------------------------ reading thread

    def _read(self) -> None:
        try:
            for answer in self._session:
                match answer:
                    case FrameResult():
                        self._add_result(answer)
                    case FrameDropped():
                        self._drop(answer)
                    case GoAway():
                        self.is_leaving = self.was_warned = True
                        self._on_change()
                    case _:
                        pass
        except LegatoError as error:
            self.error = error
        finally:
            self.is_leaving = self.is_over = True
            self._on_change()

    def _add_result(self, answer: FrameResult) -> None:
        with self._lock:
            results = self._results.setdefault(answer.sequence, {})
            results[answer.task_id] = self._with_prefix(answer.outcome)
            if not answer.last_for_frame:
                return
            del self._results[answer.sequence]
            frame = self._open.pop(answer.sequence, None)
        if frame is None:
            return
        self._on_outcome()
        age = (time.time_ns() - frame.captured_ns) / 1e9
        failed = sum(isinstance(each, LegatoError) for each in results.values())
        self._counters.count_answered(age, failed)
        self._on_answer(AnsweredFrame(frame, results, answer.image, age))

    def _with_prefix(self, outcome: Result | LegatoError) -> Result | LegatoError:
        if not self._track_prefix or not isinstance(outcome, DetectResult):
            return outcome
        return dataclasses.replace(outcome, objects=tuple(map(self._named, outcome.objects)))

    def _named(self, found: Detection) -> Detection:
        name = found.track_id and self._track_prefix + found.track_id
        return dataclasses.replace(found, track_id=name)

    def _drop(self, answer: FrameDropped) -> None:
        with self._lock:
            self._results.pop(answer.sequence, None)
            frame = self._open.pop(answer.sequence, None)
        if frame is not None:
            self._on_outcome()
            self._counters.count_dropped(answer.reason, self._session.stats.response_time)


# ---------------------------------------------------------------- feed

_RETRYABLE = (Aborted, Cancelled, DeadlineExceeded, InternalError, ResourceExhausted, Unavailable)
"""Errors that another session may not meet."""
_STARTING = ("", "ENGINE_STARTING", "DRAINING")
"""Reasons of a server that is absent or starts; an empty reason is that of a lost connection."""


@dataclasses.dataclass(frozen=True, slots=True)
class FeedSettings:
    """Tasks of each frame, by name, and their options.

    An overloaded server answers the newest frames only, unless `every` frame is required.
    Frames older than `max_age` seconds are dropped. `track` follows detected objects from frame
    to frame.
    """

    tasks: Mapping[str, Task]
    every: bool = False
    max_age: float | None = None
    model: str = ""
    adapter: str = ""
    name: str = ""
    track: bool = False

    def session_arguments(self) -> dict[str, Any]:
        """Return the arguments of `Client.session`."""
        return {
            "tasks": [self._standing_task(name, task) for name, task in self.tasks.items()],
            "policy": "every_frame" if self.every else "latest_wins",
            "max_frame_age": self.max_age,
            "when_full": "drop",  # never happens: the feed waits for a credit first
            "model": self.model,
            "adapter": self.adapter,
            "name": self.name,
        }

    def _standing_task(self, name: str, task: Task) -> Task:
        if self.track and isinstance(task, DetectTask):
            task = dataclasses.replace(task, tracking=Tracking())
        return dataclasses.replace(task, task_id=name)


class Feed:
    """Sender of offered frames through an open session, until it is finished or stopped.

    A session that the server ends, or that is lost with it, is replaced by another. Its frames
    without an outcome are sent again if `every` frame is required, else counted as lost.

    One thread calls `offer`, another `run`. The sessions' threads call `on_answer` for each
    answered frame, one at a time. A lost server is retried for `patience` seconds, None: for ever;
    the first session must open at once unless `waits`.
    """

    def __init__(
        self,
        client: Client,
        settings: FeedSettings,
        on_answer: Callable[[AnsweredFrame], None],
        counters: FrameCounters,
        *,
        patience: float | None,
        waits: bool,
    ) -> None:
        self._client = client
        self._settings = settings
        self._on_answer = on_answer
        self._counters = counters
        self._mailbox = Mailbox(settings.every)
        self._backoff = Backoff(patience)
        self._waits = waits
        self._stopped = threading.Event()
        self._resend: collections.deque[CapturedFrame] = collections.deque()
        self._num_opened = 0  # sessions
        self._sessions: list[FeedSession] = []  # the last one gets the frames
        self._answer_lock = threading.Lock()
        self._problem: OSError | None = None
        self.model = ""
        """The model of the last session, empty before the first."""

    # ------------------------------------------------------------ offering thread

    def offer(self, frame: CapturedFrame) -> None:
        """Offer a frame; waits for room if every frame must be sent."""
        self._counters.count("taken")
        if unsent := self._mailbox.put(frame):
            self._counters.count("replaced", unsent)

    def now(self, at_ns: int) -> tuple[TrackNow, ...]:
        """Predict the tracked objects of the current session; `at_ns` counts from the epoch."""
        return tuple(track for session in self._sessions[-1:] for track in session.now(at_ns))

    def finish(self) -> None:
        """Stop offering; `run` returns once every offered frame has its outcome."""
        self._mailbox.close()

    def stop(self) -> None:
        """End now; thread-safe."""
        self._stopped.set()
        if held := self._mailbox.discard():
            self._counters.count("replaced", held)
        for session in tuple(self._sessions):
            session.end()

    # ------------------------------------------------------------ sending thread

    def run(self) -> None:
        """Send until finished or stopped.

        Raises:
            LegatoError: another session would fail alike, or patience has ended.
            OSError: from `on_answer`.
        """
        try:
            while self._has_more():
                session = self._open_session()
                if session is not None:
                    self._send_to(session)
        finally:
            self.stop()
            self._join()
            self._counters.count("replaced", len(self._resend))
            self._counters.count("lost", len(self._take_unanswered()))
        if self._problem is not None:
            raise self._problem

    def _has_more(self) -> bool:
        """Return whether another session is needed; may wait for running ones."""
        self._reap_ended()
        if self._mailbox.is_done and not self._resend:
            self._join()
            self._reap_ended()
        return not self._stopped.is_set() and not (self._mailbox.is_done and not self._resend)

    def _open_session(self) -> FeedSession | None:
        """Open a session; return None after a transient error. Raises permanent errors."""
        try:
            session = FeedSession(
                self._client.session(**self._settings.session_arguments()),
                self._counters,
                self._deliver,
                self._mailbox.nudge,
                self._backoff.note_success,
                number=self._num_opened,
            )
        except LegatoError as error:
            if not isinstance(error, _RETRYABLE) or not (self._waits or self.model):
                raise
            self._wait_after(error)
            return None
        self._num_opened += 1
        self._sessions.append(session)
        self._backoff.note_reached()
        if self.model:
            self._counters.count("reconnects")
        self.model = session.model
        self._counters.server = "connected"
        return session

    def _send_to(self, session: FeedSession) -> None:
        """Send frames until the session takes no more, or there are none."""
        while not (session.is_leaving or self._stopped.is_set()):
            self._reap_ended()
            if not session.wait_for_room():
                continue
            frame = (
                self._resend.popleft()
                if self._resend
                else self._mailbox.take(self._needs_attention)
            )
            if frame is not None:
                self._send(session, frame)
            elif self._mailbox.is_done and not self._resend:
                break
        if not session.is_over:
            session.finish()

    def _send(self, session: FeedSession, frame: CapturedFrame) -> None:
        try:
            session.send(frame)
        except _RETRYABLE:
            session.finish()
            if self._settings.every:
                self._resend.appendleft(frame)
            else:
                self._counters.count("refused")

    def _needs_attention(self) -> bool:
        """Return whether a session has changed and needs attention."""
        is_leaving = any(session.is_leaving for session in self._sessions[-1:])
        return (
            is_leaving
            or self._stopped.is_set()
            or any(session.is_over for session in self._sessions)
        )

    def _reap_ended(self) -> None:
        """Reap ended sessions; wait if the one that gets the frames was lost."""
        current = self._sessions[-1] if self._sessions else None
        over = [session for session in self._sessions if session.is_over]
        self._sessions = [session for session in self._sessions if not session.is_over]
        for session in over:
            session.end()
            frames = session.take_unanswered()
            if self._settings.every:
                self._resend.extend(frames)
                self._counters.count("resent", len(frames))
            else:
                self._counters.count("lost", len(frames))
        for session in over:
            if session.error is None or self._stopped.is_set():
                continue
            if not isinstance(session.error, _RETRYABLE):
                raise session.error
            if session is current and not session.was_warned:
                self._wait_after(session.error)

    def _join(self) -> None:
        for session in self._sessions:
            session.join()

    def _take_unanswered(self) -> list[CapturedFrame]:
        return [frame for session in self._sessions for frame in session.take_unanswered()]

    def _wait_after(self, error: LegatoError) -> None:
        """Wait until the next attempt; raise the error once patience has ended."""
        is_starting = isinstance(error, Unavailable) and error.reason in _STARTING
        self._counters.server = f"lost: {error.message}"
        delay = self._backoff.next_delay(error.retry_after or 0.0, is_starting=is_starting)
        if delay is None:
            raise error
        self._stopped.wait(delay)

    def _deliver(self, answered: AnsweredFrame) -> None:
        with self._answer_lock:
            try:
                self._on_answer(answered)
            except OSError as error:
                self._problem = self._problem or error
                self._stopped.set()
                self._mailbox.close()
