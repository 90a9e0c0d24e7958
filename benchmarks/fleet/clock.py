"""Virtual time: events in the order of their time, and of their making where times are equal."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """A queue of calls; nothing waits."""

    __slots__ = ("_events", "_number", "now", "num_events")

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._number = 0

    def at(self, time: float, call: Callable[[Any], None], argument: Any) -> None:
        """Call at a time that has not passed, in seconds."""
        self._number += 1
        heapq.heappush(self._events, (time, self._number, call, argument))

    def run(self, until: float) -> None:
        """Make all calls up to a time, in seconds."""
        events, pop = self._events, heapq.heappop
        while events and events[0][0] <= until:
            self.now, _, call, argument = pop(events)
            self.num_events += 1
            call(argument)
        self.now = until
