"""Engines behind a router, with starts, ends and failures; every request has one end."""

from __future__ import annotations

import dataclasses
import random
from array import array

from benchmarks.fleet.clock import Clock
from benchmarks.fleet.costs import EngineCosts
from benchmarks.fleet.engine import Picture, Request, SimulatedEngine
from benchmarks.fleet.estimates import ESTIMATES
from benchmarks.fleet.routing import Router

RETRY = 0.1  # seconds until a refused or lost request is sent again
LONG_WAIT = 0.05  # seconds
MAX_ATTEMPTS = 4  # of the clients' service configuration


@dataclasses.dataclass(frozen=True, slots=True)
class Faults:
    """How engines die: each after an exponential time, found out by the router after `detection`.

    A replacement serves after `restart` seconds. When an engine `hangs`, its requests stay until
    the router notices; otherwise they end at once, as those do that are sent to it.
    """

    mean_life: float
    detection: float = 1.0
    restart: float = 60.0
    hangs: bool = False


@dataclasses.dataclass(slots=True)
class Counts:
    """What became of the requests of the measured window; `good` ones met their deadline."""

    sent: int = 0
    good: int = 0
    late: int = 0
    failed: int = 0  # refused, expired or lost, and not sent again
    lost: int = 0  # attempts that an engine's end cut
    wasted_seconds: float = 0.0  # of the device, for requests without a good answer or a lost try


@dataclasses.dataclass(slots=True)
class Work:
    """What engines did since `measure()`; `recomputed` pictures had been computed before."""

    engine_seconds: float = 0.0
    busy: float = 0.0
    hits: int = 0
    computed: int = 0
    recomputed: int = 0


class Fleet:
    """Engines and their router; counts from `measure()` on."""

    def __init__(
        self, clock: Clock, costs: EngineCosts, router: Router, seed: int, estimate: str = "rows"
    ) -> None:
        self.clock = clock
        self.engines: dict[int, SimulatedEngine] = {}  # that live, or that the router has listed
        self.counts = Counts()
        self.latencies = array("d")
        self.predicted = array("d")  # of waits longer than `LONG_WAIT`: the part that was predicted
        self.costs = costs
        self._work = Work()  # of engines that ended, and pictures of all
        self._router = router
        self._estimate = ESTIMATES[estimate]
        self._random = random.Random(f"faults {seed}")
        self._listed: list[SimulatedEngine] = []
        self._num_made = 0
        self._num_starts = 0
        self._measured_from = float("inf")
        self._faults: Faults | None = None
        self._starting: dict[int, float] = {}  # when each start began, by its number
        self._stuck: dict[int, list[Request]] = {}  # of engines that hang
        self.in_flight = 0
        self.num_sent = 0
        self.num_answered = 0

    # ------------------------------------------------------------ engines

    @property
    def num_serving(self) -> int:
        return len(self._listed)

    @property
    def num_starting(self) -> int:
        return len(self._starting)

    @property
    def listed(self) -> list[SimulatedEngine]:
        """The engines that the router knows, dead ones included until it notices."""
        return self._listed

    def add(self, number: int) -> None:
        """Add engines that serve at once."""
        for _ in range(number):
            engine = SimulatedEngine(self._num_made, self.clock, self.costs, self, self._estimate())
            engine.free_at = self.clock.now
            self._num_made += 1
            self.engines[engine.index] = engine
            self._listed.append(engine)
            self._plan_death(engine)
        self._router.set_engines(self._listed)

    def start(self, seconds: list[float]) -> None:
        """Start engines that serve after these times; each costs from now on."""
        for delay in seconds:
            self._num_starts += 1
            self._starting[self._num_starts] = self.clock.now
            self.clock.at(self.clock.now + delay, self._started, self._num_starts)

    def retire(self, number: int) -> None:
        """Take the last engines off the list; what they have is answered first."""
        for _ in range(min(number, len(self._listed) - 1)):
            engine = self._listed.pop()
            self._drain(engine)
        self._router.set_engines(self._listed)

    def set_faults(self, faults: Faults) -> None:
        """Let engines die from now on."""
        self._faults = faults
        for engine in list(self._listed):
            self._plan_death(engine)

    def _started(self, number: int) -> None:
        self._work.engine_seconds += self.clock.now - self._starting.pop(number)
        self.add(1)

    def _drain(self, engine: SimulatedEngine) -> None:
        if engine.num_open and engine.is_up:
            self.clock.at(self.clock.now + 0.25, self._drain, engine)
        else:
            self._forget(engine)

    def _forget(self, engine: SimulatedEngine) -> None:
        if self.engines.pop(engine.index, None) is not None:
            _add(self._work, engine, self.clock.now)

    def _plan_death(self, engine: SimulatedEngine) -> None:
        if self._faults is not None:
            life = self._random.expovariate(1 / self._faults.mean_life)
            self.clock.at(self.clock.now + life, self._die, engine)

    def _die(self, engine: SimulatedEngine) -> None:
        faults = self._faults
        if faults is None or engine.index not in self.engines or not engine.is_up:
            return
        self._stuck[engine.index] = []
        engine.die(hangs=faults.hangs)
        self.clock.at(self.clock.now + faults.detection, self._noticed, engine)

    def _noticed(self, engine: SimulatedEngine) -> None:
        assert self._faults is not None
        self._forget(engine)
        stuck = self._stuck.pop(engine.index)
        if engine in self._listed:
            self.start([self._faults.restart])
            self._listed.remove(engine)
            self._router.set_engines(self._listed)
        for request in stuck:
            self._retry(request)

    # ------------------------------------------------------------ requests

    def measure(self) -> None:
        """Count requests that arrive from now on, and work from now on."""
        self._measured_from = self.clock.now
        self.counts = Counts()
        self._work = Work()
        for engine in self.engines.values():
            engine.started = self.clock.now
            engine.busy = 0.0
            engine.num_hits = 0

    def work(self) -> Work:
        """Return what all engines did since `measure()`, those that live included."""
        work = dataclasses.replace(self._work)
        work.engine_seconds += sum(self.clock.now - since for since in self._starting.values())
        for engine in self.engines.values():
            _add(work, engine, self.clock.now)
        return work

    def send(self, request: Request) -> None:
        """Route a new request."""
        self.in_flight += 1
        self.num_sent += 1
        if request.arrival >= self._measured_from:
            self.counts.sent += 1
        self._route(request)

    def answered(self, request: Request) -> None:
        self.in_flight -= 1
        self.num_answered += 1
        if request.arrival < self._measured_from:
            return
        self.latencies.append(self.clock.now - request.arrival)
        if (wait := request.started - request.queued) > LONG_WAIT:
            self.predicted.append(request.predicted / wait)
        if self.clock.now <= request.deadline:
            self.counts.good += 1
        else:
            self.counts.late += 1
            self.counts.wasted_seconds += request.spent

    def refused(self, request: Request) -> None:
        self._retry(request)

    def expired(self, request: Request) -> None:
        self._fail(request)

    def lost(self, request: Request) -> None:
        """An engine ended with the request; a client learns that at once, or never."""
        self.counts.lost += 1
        self.counts.wasted_seconds += request.spent
        request.spent = 0.0
        self._cut(request, self._dead_engine())

    def computed(self, picture: Picture) -> None:
        self._work.computed += 1
        self._work.recomputed += picture.num_computed > 0
        picture.num_computed += 1

    def _route(self, request: Request) -> None:
        request.attempts += 1
        if not self._listed:
            self._retry(request)
            return
        engine = self._router.choose(request)
        if engine.is_up:
            engine.submit(request)
        else:
            if self._faults is not None and self._faults.hangs:
                engine.expect(request)
            self._cut(request, engine.index)

    def _cut(self, request: Request, engine: int) -> None:
        if self._faults is not None and self._faults.hangs and engine in self._stuck:
            self._stuck[engine].append(request)
        else:
            self._retry(request)

    def _dead_engine(self) -> int:
        """The engine that is dying now; the newest of those that the router has not noticed."""
        return next(reversed(self._stuck))

    def _retry(self, request: Request) -> None:
        later = self.clock.now + RETRY
        if request.attempts < MAX_ATTEMPTS and later < request.deadline:
            self.clock.at(later, self._route, request)
        else:
            self._fail(request)

    def _fail(self, request: Request) -> None:
        self.in_flight -= 1
        if request.arrival >= self._measured_from:
            self.counts.failed += 1
            self.counts.wasted_seconds += request.spent


def _add(work: Work, engine: SimulatedEngine, now: float) -> None:
    work.engine_seconds += now - engine.started
    work.busy += engine.busy
    work.hits += engine.num_hits
