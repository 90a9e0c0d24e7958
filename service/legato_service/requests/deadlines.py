"""Deadlines of all requests, on one timer."""

from __future__ import annotations

import asyncio
import math
import time

from legato_engine.errors import DeadlineExceeded

from legato_service.engine import Stream

RESOLUTION = 0.02  # seconds that a deadline may be late


class Deadlines:
    """Aborts streams with `DeadlineExceeded` past their deadlines. Needs a running event loop.

    Nearly all requests end long before their deadlines, so a timer for each would cost more than
    the wait for its result. One timer fires at the earliest deadline and finds the next one then.
    Times are `time.monotonic()` seconds.
    """

    def __init__(self) -> None:
        self._deadlines: dict[Stream, float] = {}
        self._fires_at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, stream: Stream, deadline: float) -> None:
        """Abort `stream` at `deadline`, unless forgotten before."""
        self._deadlines[stream] = deadline
        if deadline < self._fires_at:
            self._set_timer(deadline)

    def forget(self, stream: Stream) -> None:
        """Watch `stream` no longer. Idempotent."""
        self._deadlines.pop(stream, None)

    def _set_timer(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires_at = moment
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, moment - time.monotonic()), self._expire)

    def _expire(self) -> None:
        self._timer, self._fires_at = None, math.inf
        now = time.monotonic()
        for stream in [stream for stream, deadline in self._deadlines.items() if deadline <= now]:
            del self._deadlines[stream]
            stream.abort(DeadlineExceeded("the deadline passed"))
        following = min(self._deadlines.values(), default=math.inf)
        if following < math.inf:
            self._set_timer(max(following, now + RESOLUTION))
