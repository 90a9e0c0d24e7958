"""The scheduler's clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of time; tests advance theirs by hand."""

    def now(self) -> float:
        """Seconds on the clock of `Request.deadline`."""
        ...

    def perf_ns(self) -> int:
        """Nanoseconds on the clock of device events, for durations."""
        ...


class SystemClock:
    """The host's clocks; static methods avoid a Python frame, as a step reads them eight times."""

    now = staticmethod(time.monotonic)
    perf_ns = staticmethod(time.perf_counter_ns)
