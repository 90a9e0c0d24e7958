"""Work on answered pictures that takes longer than an answer."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

from legato_client.live.lane import Answered

_WAITING = 8  # pictures; each holds its pixels


class Aside:
    """Hands pictures to `take` in a thread of its own, so that reading answers goes on.

    Of more than can wait the oldest are left out, and counted as `left_out`; where `every` one is
    to be taken, the caller waits. An OSError of `take` is raised by the next call.
    """

    def __init__(self, take: Callable[[Answered], None], every: bool) -> None:
        self._take = take
        self._every = every
        self._changed = threading.Condition()  # guards the rest
        self._waiting: collections.deque[Answered] = collections.deque()
        self._closed = False
        self._problem: OSError | None = None
        self.left_out = 0
        self._thread = threading.Thread(target=self._run, name="legato-aside", daemon=True)
        self._thread.start()

    def put(self, answered: Answered) -> None:
        with self._changed:
            if self._every:
                self._changed.wait_for(lambda: len(self._waiting) < _WAITING or self._problem)
            elif len(self._waiting) == _WAITING:
                self._waiting.popleft()
                self.left_out += 1
            self._raise()
            self._waiting.append(answered)
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until all have been taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _run(self) -> None:
        while (answered := self._next()) is not None:
            try:
                self._take(answered)
            except OSError as error:
                with self._changed:
                    self._problem = error
                    self._changed.notify_all()
                return

    def _next(self) -> Answered | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            answered = self._waiting.popleft()
            self._changed.notify_all()
            return answered
