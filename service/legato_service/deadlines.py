"""When requests have to have ended: one timer for all of them."""

from __future__ import annotations

import asyncio
import math
import time

from legato_engine.errors import DeadlineExceeded

from legato_service.engine import Stream

TICK = 0.02  # seconds that a deadline may come late
_NEVER = 0


class Deadlines:
    """Aborts streams whose time is over with `DeadlineExceeded`. Needs a running loop.

    Nearly all requests end long before their time, and a timer made and dropped for each costs more
    than the wait for its answer. Times are `time.monotonic()` seconds.
    """

    def __init__(self) -> None:
        self._due: dict[int, set[Stream]] = {}  # by the tick that ends them
        self._now = 0  # the last tick that was looked at, while the timer runs
        self._ticking = False

    def watch(self, stream: Stream, deadline: float) -> int:
        """From now on, until `forget` is given what this returns."""
        if deadline == math.inf:
            return _NEVER
        if not self._ticking:
            self._ticking = True
            self._now = int(time.monotonic() / TICK)
            self._wait()
        tick = max(math.ceil(deadline / TICK), self._now + 1)
        due = self._due.get(tick)
        if due is None:
            due = self._due[tick] = set()
        due.add(stream)
        return tick

    def forget(self, stream: Stream, tick: int) -> None:
        """Harmless when its time is over."""
        watched = self._due.get(tick)
        if watched is not None:
            watched.discard(stream)
            if not watched:
                del self._due[tick]

    def _wait(self) -> None:
        asyncio.get_running_loop().call_later(TICK, self._look)

    def _look(self) -> None:
        before, self._now = self._now, int(time.monotonic() / TICK)
        for tick in range(before + 1, self._now + 1):
            for stream in self._due.pop(tick, ()):
                stream.abort(DeadlineExceeded("the deadline passed"))
        self._ticking = bool(self._due)
        if self._ticking:
            self._wait()
