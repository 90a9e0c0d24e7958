"""How long to wait before another attempt."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

_FIRST = 0.2  # seconds
_LONGEST = 5.0
_SPREAD = 0.2  # of a delay, so that clients of one server do not come back together


class Backoff:
    """Delays that double up to 5 s until a `success`.

    `patience` is for how many seconds attempts go on that reach nothing; None: for ever. What is
    `reached` may still fail at once each time, so it does not shorten the delays.
    """

    def __init__(self, patience: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._delay = _FIRST
        self._failing_since: float | None = None

    def reached(self) -> None:
        self._failing_since = None

    def success(self) -> None:
        self._delay = _FIRST
        self._failing_since = None

    def failure(self, at_least: float = 0.0) -> float | None:
        """Seconds until the next attempt, at least those that the server asks for; None: no more.

        Patience counts from the first failure since something was reached.
        """
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        delay = self._delay * random.uniform(1 - _SPREAD, 1 + _SPREAD)
        self._delay = min(2 * self._delay, _LONGEST)
        delay = max(delay, at_least)
        if self._patience is not None and now + delay > self._failing_since + self._patience:
            return None
        return delay
