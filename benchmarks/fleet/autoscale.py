"""How many engines there should be, asked at regular times, as a horizontal autoscaler does."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import deque

from benchmarks.fleet.fleet import Fleet

SIGNALS = ("queue", "busy", "demand")


@dataclasses.dataclass(frozen=True, slots=True)
class Scaling:
    """What the number of engines follows; times are virtual seconds.

    `queue`: the sum of the engines' estimated waits over `queue_target`. `busy`: the sum of busy
    shares over `busy_target`. `demand`: requests a second, refused ones included, times the busy
    seconds of an answer, over `busy_target`. A new engine serves after `start_up`, drawn between
    the two. The number falls only to the largest that was wanted within `hold`, and grows at most
    to twice itself, or by four, at a time.
    """

    signal: str = "demand"
    queue_target: float = 0.1
    busy_target: float = 0.7
    interval: float = 15.0
    hold: float = 120.0
    start_up: tuple[float, float] = (30.0, 120.0)
    min_engines: int = 1
    max_engines: int = 10_000


class Autoscaler:
    """Starts and retires a fleet's engines."""

    def __init__(self, fleet: Fleet, scaling: Scaling, seed: int) -> None:
        self._fleet = fleet
        self._scaling = scaling
        self._random = random.Random(f"starts {seed}")
        self._busy: dict[int, float] = {}  # at the last look, by engine
        self._sent, self._answered = fleet.num_sent, fleet.num_answered  # at the last look
        self._answer_seconds = 0.0  # busy seconds of an answer
        self._wanted: deque[tuple[float, int]] = deque()
        self.peak = fleet.num_serving
        self._again()

    def _look(self, _: None) -> None:
        fleet, scaling = self._fleet, self._scaling
        wanted = min(max(self.wanted(), scaling.min_engines), scaling.max_engines)
        current = fleet.num_serving + fleet.num_starting
        self.peak = max(self.peak, current)
        self._wanted.append((fleet.clock.now, wanted))
        while self._wanted[0][0] < fleet.clock.now - scaling.hold:
            self._wanted.popleft()
        if wanted > current:
            more = min(wanted - current, max(current, 4))
            fleet.start([self._random.uniform(*scaling.start_up) for _ in range(more)])
        elif (fewer := current - max(number for _, number in self._wanted)) > 0:
            fleet.retire(fewer)
        self.peak = max(self.peak, fleet.num_serving + fleet.num_starting)
        self._again()

    def wanted(self) -> int:
        """Return the number of engines that the signal asks for."""
        scaling, fleet, listed = self._scaling, self._fleet, self._fleet.listed
        queue = (
            sum(engine.estimated_wait() for engine in listed if engine.is_up) / scaling.queue_target
        )
        before, self._busy = self._busy, {engine.index: engine.busy for engine in listed}
        seconds = sum(
            engine.busy - before.get(engine.index, 0.0) for engine in listed if engine.is_up
        )
        sent, answered = fleet.num_sent - self._sent, fleet.num_answered - self._answered
        self._sent, self._answered = fleet.num_sent, fleet.num_answered
        if answered:
            self._answer_seconds = seconds / answered
        busy = seconds / scaling.interval / scaling.busy_target
        demand = sent * self._answer_seconds / scaling.interval / scaling.busy_target
        signals = {"queue": queue, "busy": busy, "demand": demand}
        return math.ceil(signals[scaling.signal] - 1e-9)

    def _again(self) -> None:
        self._fleet.clock.at(self._fleet.clock.now + self._scaling.interval, self._look, None)
