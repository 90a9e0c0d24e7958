"""The lag of the event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from legato_service.metrics.catalogue import LAG_BOUNDS
from legato_service.metrics.snapshot import Histogram

PERIOD = 0.02  # seconds: a stall of 50 ms cannot pass between two looks
WINDOW = 30.0  # seconds


class LoopLag:
    """Measures how late a timer runs. `tick` is called each time."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self.histogram = Histogram(LAG_BOUNDS)
        self._tick = tick
        self._timer: asyncio.TimerHandle | None = None
        self._longest = self._longest_before = 0.0  # in this window, and in the one before it
        self._window_ends = -math.inf

    @property
    def longest_stall(self) -> float:
        """Seconds of the longest stall of the last half to whole minute, less up to `PERIOD`."""
        return max(self._longest, self._longest_before)

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + PERIOD
        self._timer = loop.call_at(due, self._measure, loop, due)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _measure(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = loop.time()
        lag = max(0.0, now - due)
        if now >= self._window_ends:
            is_next = now < self._window_ends + WINDOW
            self._longest_before = self._longest if is_next else 0.0
            self._longest = 0.0
            self._window_ends = now + WINDOW
        self._longest = max(self._longest, lag)
        self.histogram.add(lag)
        self._tick()
        self.start()
