"""Time as the scheduler sees it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where the scheduler reads the time; tests turn it by hand."""

    def now(self) -> float:
        """Seconds on the clock of `Request.deadline`."""
        ...

    def perf_ns(self) -> int:
        """Nanoseconds on the clock of device events, for durations."""
        ...


class SystemClock:
    """The host's clocks, called without a frame of its own: a tick reads them eight times."""

    now = staticmethod(time.monotonic)
    perf_ns = staticmethod(time.perf_counter_ns)
