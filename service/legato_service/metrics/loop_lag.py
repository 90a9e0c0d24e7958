"""The lag of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from legato_service.metrics.catalogue import LAG_BOUNDS
from legato_service.metrics.snapshot import Histogram

PERIOD = 0.25  # seconds


class LoopLag:
    """Measures how late a timer runs. `tick` is called each time."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self.histogram = Histogram(LAG_BOUNDS)
        self._tick = tick
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + PERIOD
        self._timer = loop.call_at(due, self._measure, loop, due)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _measure(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self.histogram.add(max(0.0, loop.time() - due))
        self._tick()
        self.start()
