"""Which engine gets a request; each policy sees no more than its kind of router would.

An engine that died stays on the list until the router notices. All policies are deterministic by
the seed of their random numbers.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

from benchmarks.fleet.engine import Request, SimulatedEngine

VIRTUAL_NODES = 64  # of an engine on the ring
NUM_PROXIES = 16
BALANCE_FACTOR = 1.25  # Envoy's `hash_balance_factor` of 125


class Router(Protocol):
    """Chooses among the engines of its list, which is never empty when it is asked."""

    def choose(self, request: Request) -> SimulatedEngine: ...

    def set_engines(self, engines: Sequence[SimulatedEngine]) -> None: ...


class RoundRobin:
    """Each engine in turn."""

    def __init__(self, rng: random.Random) -> None:
        self._engines: Sequence[SimulatedEngine] = ()
        self._next = 0

    def set_engines(self, engines: Sequence[SimulatedEngine]) -> None:
        self._engines = engines

    def choose(self, request: Request) -> SimulatedEngine:
        self._next = (self._next + 1) % len(self._engines)
        return self._engines[self._next]


class ManyRoundRobins:
    """Several proxies that each take engines in turn, in an order of their own.

    One router for many engines sends each of them requests at nearly equal intervals, which several
    do not.
    """

    def __init__(self, rng: random.Random) -> None:
        self._random = rng
        self._turns = [RoundRobin(rng) for _ in range(NUM_PROXIES)]

    def set_engines(self, engines: Sequence[SimulatedEngine]) -> None:
        for turn in self._turns:
            turn.set_engines(self._random.sample(engines, len(engines)))

    def choose(self, request: Request) -> SimulatedEngine:
        return self._turns[int(self._random.random() * NUM_PROXIES)].choose(request)


class TwoChoices:
    """The one with fewer open requests of two at random, as Envoy's LEAST_REQUEST."""

    def __init__(self, rng: random.Random) -> None:
        self._engines: Sequence[SimulatedEngine] = ()
        self._random = rng.random

    def set_engines(self, engines: Sequence[SimulatedEngine]) -> None:
        self._engines = engines

    def choose(self, request: Request) -> SimulatedEngine:
        engines, draw = self._engines, self._random
        first = engines[int(draw() * len(engines))]
        second = engines[int(draw() * len(engines))]
        return first if first.num_open <= second.num_open else second


class LeastWait:
    """The engine with the shortest predicted wait; among idle ones that which is idle longest.

    Each engine has one entry in a heap, at a time when it will be free. Entries of engines that got
    more work meanwhile are corrected when they are reached.
    """

    def __init__(self, rng: random.Random) -> None:
        self._heap: list[tuple[float, int, SimulatedEngine]] = []

    def set_engines(self, engines: Sequence[SimulatedEngine]) -> None:
        self._heap = [(engine.free_at, engine.index, engine) for engine in engines]
        heapq.heapify(self._heap)

    def choose(self, request: Request) -> SimulatedEngine:
        heap = self._heap
        while True:
            free_at, index, engine = heap[0]
            if engine.free_at <= free_at:
                return engine
            heapq.heapreplace(heap, (engine.free_at, index, engine))


class RingHash:
    """The engine that a consistent hash of the picture names, whatever its load.

    With a `balance_factor` the next one on the ring is taken while an engine would have more than
    that multiple of the mean number of open requests.
    """

    def __init__(self, rng: random.Random, balance_factor: float = 0.0) -> None:
        self._factor = balance_factor
        self._hashes: list[int] = []
        self._ring: list[SimulatedEngine] = []
        self._engines: Sequence[SimulatedEngine] = ()
        self._open = 0
        self._counted = 0

    def set_engines(self, engines: Sequence[SimulatedEngine]) -> None:
        self._engines = engines
        points = sorted(
            (_hash(f"{engine.index}/{node}"), engine.index, engine)
            for engine in engines
            for node in range(VIRTUAL_NODES)
        )
        self._hashes = [point for point, *_ in points]
        self._ring = [engine for *_, engine in points]

    def choose(self, request: Request) -> SimulatedEngine:
        ring = self._ring
        start = bisect.bisect(self._hashes, _mixed(request.picture.key)) % len(ring)
        if not self._factor:
            return ring[start]
        bound = self._factor * (self._mean_open() + 1)
        return next(
            (
                ring[(start + step) % len(ring)]
                for step in range(len(ring))
                if ring[(start + step) % len(ring)].num_open + 1 <= bound
            ),
            ring[start],
        )

    def _mean_open(self) -> float:
        """Of 64 engines in turn, where there are more: a mean of 10,000 at each request is dear."""
        engines = self._engines
        if len(engines) <= _SAMPLE:
            return sum(engine.num_open for engine in engines) / len(engines)
        self._counted = (self._counted + _SAMPLE) % len(engines)
        sample = itertools.islice(itertools.cycle(engines), self._counted, self._counted + _SAMPLE)
        return sum(engine.num_open for engine in sample) / _SAMPLE


class Affinity:
    """The engine that was last sent the picture, unless it would take longer there than elsewhere.

    The bound is in seconds: its wait may exceed the other's by `patience` times the seconds that
    computing the picture again takes. The other one is that of `LeastWait` or, with `blind`, of
    `TwoChoices`.
    """

    def __init__(
        self,
        rng: random.Random,
        image_seconds: float,
        patience: float = 1.0,
        *,
        blind: bool = False,
    ) -> None:
        self._others: Router = TwoChoices(rng) if blind else LeastWait(rng)
        self._allowed = image_seconds * patience
        self._engines: dict[int, SimulatedEngine] = {}

    def set_engines(self, engines: Sequence[SimulatedEngine]) -> None:
        self._others.set_engines(engines)
        self._engines = {engine.index: engine for engine in engines}

    def choose(self, request: Request) -> SimulatedEngine:
        picture = request.picture
        holder = self._engines.get(picture.holder)
        other = self._others.choose(request)
        if holder is not None and holder.wait() <= other.wait() + self._allowed:
            return holder
        picture.holder = other.index
        return other


_SAMPLE = 64
POLICIES: dict[str, Callable[[random.Random, float], Router]] = {
    "round robin": lambda rng, _: RoundRobin(rng),
    "round robin, 16 proxies": lambda rng, _: ManyRoundRobins(rng),
    "two choices": lambda rng, _: TwoChoices(rng),
    "least wait": lambda rng, _: LeastWait(rng),
    "ring hash": lambda rng, _: RingHash(rng),
    "ring hash, bounded": lambda rng, _: RingHash(rng, BALANCE_FACTOR),
    "affinity": Affinity,
    "affinity, two choices": lambda rng, image: Affinity(rng, image, blind=True),
    "affinity, unbounded": lambda rng, image: Affinity(rng, image, 1e9),
}


def _hash(text: str) -> int:
    return _mixed(zlib.crc32(text.encode()))


def _mixed(number: int) -> int:
    """Spread consecutive numbers over 32 bits."""
    number = (number ^ (number >> 16)) * 0x45D9F3B & 0xFFFFFFFF
    number = (number ^ (number >> 16)) * 0x45D9F3B & 0xFFFFFFFF
    return number ^ (number >> 16)
