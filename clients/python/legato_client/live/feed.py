"""Pictures to a server, through as many sessions as it takes."""

from __future__ import annotations

import collections
import dataclasses
import threading
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
from legato_client._values.tasks import DetectTask, Task, Tracking
from legato_client.live.backoff import Backoff
from legato_client.live.figures import Figures
from legato_client.live.lane import Answered, Lane
from legato_client.live.mailbox import Mailbox
from legato_client.live.shot import Shot

_PASSING = (Aborted, Cancelled, DeadlineExceeded, InternalError, ResourceExhausted, Unavailable)
"""Errors after which another session may fare better."""


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What is asked about each picture, by name, and how.

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
        """Where every picture is sent, this waits for room."""
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
        """Whether another session is needed; wait for those that run where only they can tell."""
        self._settle()
        if self._mailbox.is_done and not self._again:
            self._join()
            self._settle()
        return not self._stopped.is_set() and not (self._mailbox.is_done and not self._again)

    def _opened(self) -> Lane | None:
        """None if it did not open; raises what would not pass."""
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
        """Whether a session has changed, so that there may be something to do but sending."""
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
