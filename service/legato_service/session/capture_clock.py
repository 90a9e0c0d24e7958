"""The age of frames on arrival, from capture times on the client's clock."""

from __future__ import annotations

import math


class CaptureClock:
    """Computes ages from capture times. Times are seconds; frames of one session come in order.

    A client's clock may be wrong, or start at zero. It is trusted as long as the least delay so far
    is plausible: at least 0 and below `max_age`. Otherwise that delay counts as the difference of
    the clocks, and ages are relative to it.
    """

    def __init__(self, max_age: float) -> None:
        self._max_age = max_age
        self._least_delay = math.inf

    def age(self, captured: float, now: float) -> float:
        """Return the age of a frame, from its capture on the client's clock and `now` on ours."""
        delay = now - captured
        self._least_delay = min(self._least_delay, delay)
        if 0 <= self._least_delay < self._max_age:
            return delay
        return delay - self._least_delay
