"""How old a frame is when it arrives, told from a clock that is not ours."""

from __future__ import annotations

import math


class CaptureClock:
    """Reads ages from capture times. All times are seconds; those of one session, in order.

    A caller's clock may be off, or count from its own start. It is trusted while the quickest frame
    so far shows a delay that could be one: at least 0, and below `max_age`. Otherwise that frame's
    delay is the clocks' difference, and ages count from it.
    """

    def __init__(self, max_age: float) -> None:
        self._max_age = max_age
        self._least = math.inf

    def age(self, captured: float, now: float) -> float:
        """The age at `now`, our wall clock, of a frame captured at `captured`, the caller's."""
        delay = now - captured
        self._least = min(self._least, delay)
        if 0 <= self._least < self._max_age:
            return delay
        return delay - self._least
