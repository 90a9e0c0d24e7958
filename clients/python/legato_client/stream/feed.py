"""Streams frames through sessions, reconnecting as needed."""

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
from legato_client._types.results import DetectResult, FrameStamp, ImageInfo, Result
from legato_client._types.server import FrameDropped, FrameResult, GoAway
from legato_client._types.tasks import DetectTask, Task, Tracking
from legato_client.stream.frames import Backoff, Figures, Mailbox, Shot

_LOOK = 0.2  # seconds; how soon a sender without room sees that it should end
Outcomes = Mapping[str, Result | LegatoError]


class Answered:
    """A picture with the outcome of each task, in the tasks' order; `age` is in seconds."""

    __slots__ = ("age", "image", "outcomes", "shot")

    def __init__(self, shot: Shot, outcomes: Outcomes, image: ImageInfo | None, age: float) -> None:
        self.shot = shot
        self.outcomes = outcomes
        self.image = image
        self.age = age


class Lane:
    """A session with a thread that reads its answers; another thread sends.

    It `leaves` once it should get no more pictures, announced by the server if it `was_warned`,
    and `is_over` once it has ended; `unanswered` are then the pictures without an outcome.
    `changed` is called at both. Tracks are named anew in each session: those of all but the first
    have the session's `number` before their names, so that none is used twice.
    """

    def __init__(
        self,
        session: Session,
        figures: Figures,
        tell: Callable[[Answered], None],
        changed: Callable[[], None],
        worked: Callable[[], None],
        *,
        number: int,
    ) -> None:
        """`worked` is called at each outcome; raises LegatoError if the session does not open."""
        self._session = session.__enter__()
        self._figures = figures
        self._tell = tell
        self._changed = changed
        self._worked = worked
        self._track_prefix = f"{number + 1}-" if number else ""
        self._lock = threading.Lock()  # guards the two below
        self._open: dict[int, Shot] = {}
        self._results: dict[int, dict[str, Result | LegatoError]] = {}
        self._last_sequence = 0
        self.leaves = False
        self.was_warned = False
        self.is_over = False
        self.error: LegatoError | None = None
        self._reader = threading.Thread(target=self._read, name="legato-lane", daemon=True)
        self._reader.start()

    @property
    def model(self) -> str:
        return self._session.terms.model

    def has_room(self) -> bool:
        """Wait a moment for room for a picture."""
        try:
            return self._session.wait_for_credit(_LOOK)
        except LegatoError:
            self.leaves = True
            return False

    def send(self, shot: Shot) -> None:
        """Convert and send it. Raises LegatoError if the session takes no more pictures."""
        try:
            image = shot.read()
        except (OSError, ValueError):
            self._figures.count("unreadable")
            return
        self._last_sequence += 1
        sequence = self._last_sequence
        with self._lock:  # before it is sent: its answer may come at once
            self._open[sequence] = shot
        stamp = FrameStamp(shot.frame_id, shot.captured_ns, sequence)
        sent = None
        try:
            sent = self._session.send(image, stamp=stamp)
        finally:
            if sent is None:
                with self._lock:
                    self._open.pop(sequence, None)
        self._figures.count("refused" if sent is None else "sent")

    def finish(self) -> None:
        """Send no more; what is under way is answered."""
        self.leaves = True
        with contextlib.suppress(LegatoError):  # it has ended already
            self._session.finish()

    def end(self) -> None:
        """End it now; for any thread."""
        self._session.close()

    def join(self) -> None:
        """Wait for its end."""
        self._reader.join()

    def unanswered(self) -> list[Shot]:
        """Yield unanswered frames in sending order, each once."""
        with self._lock:
            shots = [self._open[sequence] for sequence in sorted(self._open)]
            self._open.clear()
        return shots

    # ------------------------------------------------------------ the reading thread

    def _read(self) -> None:
        try:
            for answer in self._session:
                match answer:
                    case FrameResult():
                        self._result(answer)
                    case FrameDropped():
                        self._dropped(answer)
                    case GoAway():
                        self.leaves = self.was_warned = True
                        self._changed()
                    case _:
                        pass
        except LegatoError as error:
            self.error = error
        finally:
            self.leaves = self.is_over = True
            self._changed()

    def _result(self, answer: FrameResult) -> None:
        with self._lock:
            results = self._results.setdefault(answer.sequence, {})
            results[answer.task_id] = self._renamed(answer.outcome)
            if not answer.last_for_frame:
                return
            del self._results[answer.sequence]
            shot = self._open.pop(answer.sequence, None)
        if shot is None:
            return
        self._worked()
        age = (time.time_ns() - shot.captured_ns) / 1e9
        failed = sum(isinstance(each, LegatoError) for each in results.values())
        self._figures.answered(age, failed)
        self._tell(Answered(shot, results, answer.image, age))

    def _renamed(self, outcome: Result | LegatoError) -> Result | LegatoError:
        if not self._track_prefix or not isinstance(outcome, DetectResult):
            return outcome
        objects = (
            dataclasses.replace(each, track_id=each.track_id and self._track_prefix + each.track_id)
            for each in outcome.objects
        )
        return dataclasses.replace(outcome, objects=tuple(objects))

    def _dropped(self, answer: FrameDropped) -> None:
        with self._lock:
            self._results.pop(answer.sequence, None)
            shot = self._open.pop(answer.sequence, None)
        if shot is not None:
            self._worked()
            self._figures.dropped(answer.reason)


# ---------------------------------------------------------------- feed

# Pictures to a server, through as many sessions as it takes.

_PASSING = (Aborted, Cancelled, DeadlineExceeded, InternalError, ResourceExhausted, Unavailable)
"""Errors after which another session may fare better."""


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """Tasks of each frame, by name, and their options.

    Of more pictures than can be answered the newest are, unless `every` is to be. `max_age` is in
    seconds; older pictures are dropped. With `track` detected objects are followed from picture to
    picture.
    """

    tasks: Mapping[str, Task]
    every: bool = False
    max_age: float | None = None
    model: str = ""
    adapter: str = ""
    name: str = ""
    track: bool = False

    def session(self) -> dict[str, Any]:
        """Arguments of `Client.session`."""
        return {
            "tasks": [self._standing(name, task) for name, task in self.tasks.items()],
            "policy": "every_frame" if self.every else "latest_wins",
            "max_frame_age": self.max_age,
            "when_full": "drop",  # never, as the feed waits for room before it chooses a picture
            "model": self.model,
            "adapter": self.adapter,
            "name": self.name,
        }

    def _standing(self, name: str, task: Task) -> Task:
        if self.track and isinstance(task, DetectTask):
            task = dataclasses.replace(task, tracking=Tracking())
        return dataclasses.replace(task, task_id=name)


class Feed:
    """Keeps a session open and sends it what is offered, until it is finished or stopped.

    A session that the server ends, or that is lost with it, is followed by another. Its pictures
    without an outcome are sent again where `every` picture is asked about, else counted as lost.

    `offer` is for one thread, `run` for another. `tell` is called for each answered picture by the
    threads of the sessions, one at a time. `patience` is for how many seconds a lost
    server is looked for, None: for ever; the first session must open at once unless `waits`.
    """

    def __init__(
        self,
        client: Client,
        asked: Asked,
        tell: Callable[[Answered], None],
        figures: Figures,
        *,
        patience: float | None,
        waits: bool,
    ) -> None:
        self._client = client
        self._asked = asked
        self._tell = tell
        self._figures = figures
        self._mailbox = Mailbox(asked.every)
        self._backoff = Backoff(patience)
        self._waits = waits
        self._stopped = threading.Event()
        self._again: collections.deque[Shot] = collections.deque()
        self._num_opened = 0  # sessions
        self._lanes: list[Lane] = []  # the one that gets pictures is the last
        self._telling = threading.Lock()
        self._problem: OSError | None = None
        self.model = ""
        """The model of the last session, empty before the first."""

    # ------------------------------------------------------------ the thread with pictures

    def offer(self, shot: Shot) -> None:
        """Offer a frame; waits for room if every frame must be sent."""
        self._figures.count("taken")
        if unsent := self._mailbox.put(shot):
            self._figures.count("replaced", unsent)

    def finish(self) -> None:
        """No more will be offered: `run` returns once what was offered has its outcome."""
        self._mailbox.close()

    def stop(self) -> None:
        """End now; for any thread."""
        self._stopped.set()
        if held := self._mailbox.discard():
            self._figures.count("replaced", held)
        for lane in tuple(self._lanes):
            lane.end()

    # ------------------------------------------------------------ the thread that sends

    def run(self) -> None:
        """Send until finished or stopped.

        Raises:
            LegatoError: another session would meet it too, or patience has ended.
            OSError: from `tell`.
        """
        try:
            while self._has_more():
                lane = self._opened()
                if lane is not None:
                    self._send_to(lane)
        finally:
            self.stop()
            self._join()
            self._figures.count("replaced", len(self._again))
            self._figures.count("lost", len(self._unanswered()))
        if self._problem is not None:
            raise self._problem

    def _has_more(self) -> bool:
        """Return whether another session is needed; may wait for running ones."""
        self._settle()
        if self._mailbox.is_done and not self._again:
            self._join()
            self._settle()
        return not self._stopped.is_set() and not (self._mailbox.is_done and not self._again)

    def _opened(self) -> Lane | None:
        """Open a session, or return None; raises permanent errors."""
        try:
            session = self._client.session(**self._asked.session())
            lane = Lane(
                session,
                self._figures,
                self._hand_on,
                self._mailbox.nudge,
                self._backoff.success,
                number=self._num_opened,
            )
        except LegatoError as error:
            if not isinstance(error, _PASSING) or not (self._waits or self.model):
                raise
            self._wait_after(error)
            return None
        self._num_opened += 1
        self._lanes.append(lane)
        self._backoff.reached()
        if self.model:
            self._figures.count("reconnects")
        self.model = lane.model
        self._figures.server = "connected"
        return lane

    def _send_to(self, lane: Lane) -> None:
        """Send pictures until the session takes no more, or there are none."""
        while not (lane.leaves or self._stopped.is_set()):
            self._settle()
            if not lane.has_room():
                continue
            shot = self._again.popleft() if self._again else self._mailbox.take(self._must_look)
            if shot is not None:
                self._send(lane, shot)
            elif self._mailbox.is_done and not self._again:
                break
        if not lane.is_over:
            lane.finish()

    def _send(self, lane: Lane, shot: Shot) -> None:
        try:
            lane.send(shot)
        except _PASSING:
            lane.finish()
            if self._asked.every:
                self._again.appendleft(shot)
            else:
                self._figures.count("refused")

    def _must_look(self) -> bool:
        """Return whether a session has changed and needs attention."""
        leaves = any(lane.leaves for lane in self._lanes[-1:])
        return leaves or self._stopped.is_set() or any(lane.is_over for lane in self._lanes)

    def _settle(self) -> None:
        """Take leave of sessions that have ended; wait if the one that gets pictures was lost."""
        current = self._lanes[-1] if self._lanes else None
        over = [lane for lane in self._lanes if lane.is_over]
        self._lanes = [lane for lane in self._lanes if not lane.is_over]
        for lane in over:
            lane.end()
            shots = lane.unanswered()
            if self._asked.every:
                self._again.extend(shots)
                self._figures.count("resent", len(shots))
            else:
                self._figures.count("lost", len(shots))
        for lane in over:
            if lane.error is None or self._stopped.is_set():
                continue
            if not isinstance(lane.error, _PASSING):
                raise lane.error
            if lane is current and not lane.was_warned:
                self._wait_after(lane.error)

    def _join(self) -> None:
        for lane in self._lanes:
            lane.join()

    def _unanswered(self) -> list[Shot]:
        return [shot for lane in self._lanes for shot in lane.unanswered()]

    def _wait_after(self, error: LegatoError) -> None:
        """Raises the error when patience has ended."""
        self._figures.server = f"lost: {error.message}"
        delay = self._backoff.failure(error.retry_after or 0.0)
        if delay is None:
            raise error
        self._stopped.wait(delay)

    def _hand_on(self, answered: Answered) -> None:
        with self._telling:
            try:
                self._tell(answered)
            except OSError as error:
                self._problem = self._problem or error
                self._stopped.set()
                self._mailbox.close()
