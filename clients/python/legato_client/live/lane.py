"""One session of a feed."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping

from legato_client._errors import LegatoError
from legato_client._session.blocking_session import Session
from legato_client._values.results import DetectResult, FrameStamp, ImageInfo, Result
from legato_client._values.session import FrameDropped, FrameResult, GoAway
from legato_client.live.figures import Figures
from legato_client.live.shot import Shot

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
        """In the order in which they were sent; each is told once."""
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
