"""Frame streaming through sessions, reconnecting as needed."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
from legato_client._session.sessions import Session
from legato_client._types.results import (
    Detection,
    DetectResult,
    FrameStamp,
    ImageInfo,
    Result,
    TrackNow,
    overlap,
)
from legato_client._types.server import FrameDropped, FrameResult, GoAway
from legato_client._types.tasks import DetectTask, Task, Tracking
from legato_client.stream.frames import Backoff, CapturedFrame, FrameCounters, Mailbox

_CREDIT_POLL_S = 0.2  # poll interval while out of credits
_SAME_OBJECT = 0.3  # IoU with a prediction from which on an object is taken for the same
Outcomes = Mapping[str, Result | LegatoError]
Predict = Callable[[int], Sequence[TrackNow]]
"""Function that predicts tracked objects at a time in nanoseconds since the epoch."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AnsweredFrame:
    """Frame with the outcome of each task, in the tasks' order; `age` is in seconds."""

    frame: CapturedFrame
    outcomes: Outcomes
    image: ImageInfo | None
    age: float


class TrackNames:
    """Names of the tracks of one session, which each session numbers from 1.

    A track whose object is found where `earlier`, the session before, expects one of the same task
    continues that track and gets its name. The others get the session's `number` as a prefix, so
    that no name is used twice. Thread-safe.
    """

    def __init__(self, number: int, earlier: Predict | None) -> None:
        self._prefix = f"{number + 1}-" if number else ""
        self._lock = threading.RLock()  # guards the rest
        self._names: dict[str, str] = {}  # those decided while there are earlier tracks to continue
        self.earlier = earlier

    def rename(
        self, found: Sequence[Detection], task_id: str, captured_ns: int
    ) -> tuple[Detection, ...]:
        """Name the tracks of a task's objects, found in a frame of that time."""
        with self._lock:
            unnamed = [each for each in found if each.track_id and each.track_id not in self._names]
            candidates = self.not_continued(captured_ns)
            pairs = (
                (overlap(track.box, each.box), track.track_id, each.track_id)
                for track in candidates
                for each in unnamed
                if track.task_id == task_id
            )
            for shared, name, own in sorted(pairs, reverse=True):
                if shared >= _SAME_OBJECT and own not in self._names and not self._is_taken(name):
                    self._names[own] = name
            if self.earlier is not None:  # a name never changes
                for each in unnamed:
                    self._names.setdefault(each.track_id, self._prefix + each.track_id)
            return tuple(dataclasses.replace(f, track_id=self._name(f.track_id)) for f in found)

    def not_continued(self, at_ns: int) -> list[TrackNow]:
        """Predict the earlier tracks that no own one continues so far."""
        with self._lock:
            tracks = self.earlier(at_ns) if self.earlier is not None else ()
            if not tracks:
                self.earlier = None  # all have ended, and with them what they keep alive
            return [track for track in tracks if not self._is_taken(track.track_id)]

    def _is_taken(self, name: str) -> bool:
        return name in self._names.values()

    def _name(self, own: str) -> str:
        return own and self._names.get(own, self._prefix + own)


class FeedSession:
    """Session with a thread that reads its answers; another thread sends.

    It `is_leaving` once it should get no more frames, announced by the server if it `was_warned`,
    and `is_over` once it has ended; `take_unanswered` then returns the frames without an outcome.
    `on_change` is called at both. Its `names` continue the tracks of the session before.
    """

    def __init__(
        self,
        session: Session,
        counters: FrameCounters,
        on_answer: Callable[[AnsweredFrame], None],
        on_change: Callable[[], None],
        on_outcome: Callable[[], None],
        names: TrackNames,
    ) -> None:
        """Open the session; `on_outcome` is called at each outcome. Raises LegatoError."""
        self._session = session.__enter__()
        self._counters = counters
        self._on_answer = on_answer
        self._on_change = on_change
        self._on_outcome = on_outcome
        self._names = names
        self._has_answered = False
        self._lock = threading.Lock()  # guards the frames without an outcome, and their results
        self._open: dict[int, tuple[CapturedFrame, dict[str, Result | LegatoError]]] = {}
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

    @property
    def predictions(self) -> Predict | None:
        """Return what a session that follows continues: before an answer, what this one does."""
        return self.now if self._has_answered else self._names.earlier

    def now(self, at_ns: int) -> tuple[TrackNow, ...]:
        """Predict the tracked objects, with those of the session before that are not found yet."""
        tracks: list[TrackNow] = []
        by_frame: dict[tuple[str, float], list[TrackNow]] = {}
        for each in self._session.now(at_ns):
            by_frame.setdefault((each.task_id, each.age), []).append(each)
        for (task_id, age), group in by_frame.items():
            found = self._names.rename([t.last for t in group], task_id, at_ns - round(age * 1e9))
            tracks += [dataclasses.replace(t, last=f) for t, f in zip(group, found, strict=True)]
        return (*tracks, *self._names.not_continued(at_ns))

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
        except (OSError, ValueError) as error:
            self._counters.problem = str(error)
            self._counters.count("unreadable")
            return
        self._last_sequence += 1
        sequence = self._last_sequence
        with self._lock:  # before it is sent: its answer may come at once
            self._open[sequence] = frame, {}
        stamp = FrameStamp(frame.frame_id, frame.captured_ns, sequence)
        sent = None
        try:
            sent = self._session.send(image, stamp=stamp)
        finally:
            if sent is None:
                with self._lock:
                    self._open.pop(sequence, None)
        self._counters.count("refused" if sent is None else "sent")

    def update_tasks(self, settings: FeedSettings) -> None:
        """Ask the tasks of other settings from the next frame on; thread-safe."""
        try:
            self._session.update_tasks(settings.session_arguments()["tasks"])
        except LegatoError:
            self.is_leaving = True

    def finish(self) -> None:
        """Stop sending; frames in flight are still answered."""
        self.is_leaving = True
        with contextlib.suppress(LegatoError):  # it has ended already
            self._session.finish()

    def end(self) -> None:
        """End the session now; thread-safe."""
        self._session.close()

    def join(self) -> None:
        self._reader.join()

    def take_unanswered(self) -> list[CapturedFrame]:
        """Return the unanswered frames in sending order, each once."""
        with self._lock:
            frames = [self._open[sequence][0] for sequence in sorted(self._open)]
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
            self._has_answered = True
            if answer.sequence not in self._open:
                return
            frame, results = self._open[answer.sequence]
            results[answer.task_id] = self._renamed(answer, frame)
            if not answer.last_for_frame:
                return
            del self._open[answer.sequence]
        self._on_outcome()
        age = (time.time_ns() - frame.captured_ns) / 1e9
        failures = [each for each in results.values() if isinstance(each, LegatoError)]
        if failures:
            self._counters.problem = str(failures[-1])
        self._counters.count_answered(age, len(failures))
        self._on_answer(AnsweredFrame(frame, results, answer.image, age))

    def _renamed(self, answer: FrameResult, frame: CapturedFrame) -> Result | LegatoError:
        outcome = answer.outcome
        if not isinstance(outcome, DetectResult):
            return outcome
        objects = self._names.rename(outcome.objects, answer.task_id, frame.captured_ns)
        return dataclasses.replace(outcome, objects=objects)

    def _drop(self, answer: FrameDropped) -> None:
        with self._lock:
            opened = self._open.pop(answer.sequence, None)
        if opened is not None:
            self._on_outcome()
            self._counters.count_dropped(answer.reason, self._session.stats.response_time)


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
        self._newest: FeedSession | None = None  # also when it has ended
        self._answer_lock = threading.Lock()
        self._problem: OSError | None = None
        self.model = ""
        """The model of the last session, empty before the first."""

    # ------------------------------------------------------------ offering thread

    def offer(self, frame: CapturedFrame) -> None:
        """Offer a frame; waits for room if every frame must be sent."""
        self._counters.count("taken")
        self._counters.count("replaced", self._mailbox.put(frame))

    def now(self, at_ns: int) -> tuple[TrackNow, ...]:
        """Predict the tracked objects, also while no session is open.

        `at_ns` counts from the epoch.
        """
        return () if self._newest is None else self._newest.now(at_ns)

    def change(self, settings: FeedSettings) -> None:
        """Use other settings from the next frame on, but for `every`; thread-safe.

        Other tasks are asked in the same session, whose tracks stay where their tasks do. Any
        other change opens another session.
        """
        before, self._settings = self._settings, settings
        asks_only = dataclasses.replace(before, tasks=settings.tasks) == settings
        for session in self._sessions[-1:]:
            if asks_only:
                session.update_tasks(settings)
            else:
                session.is_leaving = True
        self._mailbox.nudge()

    def finish(self) -> None:
        """Stop offering; `run` returns once every offered frame has its outcome."""
        self._mailbox.close()

    def stop(self) -> None:
        """End now; thread-safe."""
        self._stopped.set()
        self._counters.count("replaced", self._mailbox.discard())
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
            self._counters.count("lost", sum(len(s.take_unanswered()) for s in self._sessions))
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
        settings = self._settings
        earlier = self._newest.predictions if self._newest is not None else None
        try:
            session = FeedSession(
                self._client.session(**settings.session_arguments()),
                self._counters,
                self._deliver,
                self._mailbox.nudge,
                self._backoff.note_success,
                TrackNames(self._num_opened, earlier),
            )
        except LegatoError as error:
            if not isinstance(error, _RETRYABLE) or not (self._waits or self.model):
                raise
            self._wait_after(error)
            return None
        self._num_opened += 1
        self._sessions.append(session)
        self._newest = session
        session.is_leaving |= self._settings is not settings  # changed before it was known here
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
        is_leaving = any(session.is_leaving for session in self._sessions[-1:])
        has_ended = any(session.is_over for session in self._sessions)
        return is_leaving or has_ended or self._stopped.is_set()

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
