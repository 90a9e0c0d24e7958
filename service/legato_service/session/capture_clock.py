"""The age of frames on arrival, and when they were captured."""

from __future__ import annotations

import math


class CaptureClock:
    """Computes ages from capture times on the client's clock, in seconds and in order.

    The clock is trusted as long as the least delay so far is at least 0 and below `max_age`.
    Otherwise that delay counts as the difference of the clocks, and ages are relative to it.
    """

    def __init__(self, max_age: float) -> None:
        self._max_age = max_age
        self._least_delay = math.inf

    def age(self, captured: float, now: float) -> float:
        delay = now - captured
        self._least_delay = min(self._least_delay, delay)
        if 0 <= self._least_delay < self._max_age:
            return delay
        return delay - self._least_delay

    def captured(self, now: float) -> float:
        """The capture time of a frame without one: it is taken to have been as quick as any."""
        return now - self._least_delay if math.isfinite(self._least_delay) else now
