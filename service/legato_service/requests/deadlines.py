"""When requests have to have ended: one timer for all of them."""

from __future__ import annotations

import asyncio
import math
import time

from legato_engine.errors import DeadlineExceeded

from legato_service.engine import Stream

TICK = 0.02  # seconds that a deadline may come late


class Deadlines:
    """Aborts streams whose time is over with `DeadlineExceeded`. Needs a running loop.

    Nearly all requests end long before their time, and a timer made and dropped for each costs more
    than the wait for its answer. So one timer waits for the earliest deadline there was, and finds
    the next one when it looks. Times are `time.monotonic()` seconds.
    """

    def __init__(self) -> None:
        self._due: dict[Stream, float] = {}
        self._look_at = math.inf  # when the timer is over
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, stream: Stream, deadline: float) -> None:
        """From now on, until `forget`."""
        self._due[stream] = deadline
        if deadline < self._look_at:
            self._wait_until(deadline)

    def forget(self, stream: Stream) -> None:
        """Harmless when its time is over."""
        self._due.pop(stream, None)

    def _wait_until(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._look_at = moment
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, moment - time.monotonic()), self._look)

    def _look(self) -> None:
        self._timer, self._look_at = None, math.inf
        now = time.monotonic()
        for stream in [stream for stream, deadline in self._due.items() if deadline <= now]:
            del self._due[stream]
            stream.abort(DeadlineExceeded("the deadline passed"))
        following = min(self._due.values(), default=math.inf)
        if following < math.inf:
            self._wait_until(max(following, now + TICK))
