"""The simulated fleet: invariants that hold for every policy, and the engine beside records."""

from __future__ import annotations

import dataclasses
import random

import pytest

from benchmarks.fleet import validate
from benchmarks.fleet.autoscale import Autoscaler, Scaling
from benchmarks.fleet.clock import Clock
from benchmarks.fleet.costs import measured
from benchmarks.fleet.engine import Picture, Request, SimulatedEngine
from benchmarks.fleet.fleet import Faults, Fleet
from benchmarks.fleet.routing import POLICIES, Affinity, LeastWait, RingHash, RoundRobin
from benchmarks.fleet.simulate import Figures, Run, simulate
from benchmarks.fleet.workload import Source, Workload, steady
from benchmarks.provenance import ROOT
from benchmarks.records import Records

RECORDS = Records(ROOT)
COSTS = measured(RECORDS)
MIX = Workload(steady(600), mean_questions=5 / 3, hot_share=0.2, long_share=0.1)


def unaccounted(figures: Figures) -> int:
    """Requests without an end, or with two."""
    ended = figures.good + figures.late + figures.failed
    return abs(figures.sent - ended) + abs(figures.in_flight)


def faulty(policy: str, *, hangs: bool) -> Run:
    """A run in which engines die, twice a second in all."""
    faults = Faults(mean_life=5.0, detection=0.5, restart=1.0, hangs=hangs)
    return Run(10, MIX, policy, seconds=5.0, warm_up=1.0, faults=faults)


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_has_one_end(policy: str, hangs: bool) -> None:
    """Requests are conserved by every policy while engines die."""
    figures = simulate(faulty(policy, hangs=hangs), COSTS)
    assert figures.lost > 0
    assert figures.good > 1000
    assert unaccounted(figures) == 0


def test_a_lost_request_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that forgets its requests when it dies breaks the conservation."""
    monkeypatch.setattr(Fleet, "lost", lambda self, request: None)
    assert unaccounted(simulate(faulty("two choices", hangs=False), COSTS)) > 0


def test_equal_seeds_give_equal_runs() -> None:
    """All figures follow from the seed, and another seed gives others."""
    run = faulty("affinity", hangs=True)
    assert simulate(run, COSTS) == simulate(run, COSTS)
    assert simulate(run, COSTS) != simulate(dataclasses.replace(run, seed=1), COSTS)


class _LongestWait(LeastWait):
    """A planted fault: among three engines in turn, the one with the longest wait."""

    def __init__(self, rng: random.Random) -> None:
        self._turn = RoundRobin(rng)

    def set_engines(self, engines: list[SimulatedEngine]) -> None:  # type: ignore[override]
        self._turn.set_engines(engines)

    def choose(self, request: Request) -> SimulatedEngine:
        return max((self._turn.choose(request) for _ in range(3)), key=lambda e: e.wait())


def p99(policy: str) -> float:
    """P99 where answers differ in cost, at about nine tenths of what the engines can do."""
    workload = Workload(steady(1150), long_share=0.1)
    return simulate(Run(20, workload, policy, seconds=6.0, warm_up=2.0), COSTS).p99


def test_least_wait_is_no_worse_than_round_robin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where requests differ in cost, knowing the waits helps; the opposite choice is noticed."""
    turns = p99("round robin")
    assert p99("least wait") <= turns
    monkeypatch.setitem(POLICIES, "least wait", lambda rng, _: _LongestWait(rng))
    assert p99("least wait") > turns


def test_affinity_computes_fewer_pictures_again() -> None:
    """With affinity a second question finds its picture; round robin computes it again."""
    workload = Workload(steady(620), mean_questions=5 / 3)
    runs = {
        name: simulate(Run(10, workload, name, seconds=4.0), COSTS)
        for name in ("round robin", "ring hash", "affinity")
    }
    assert runs["ring hash"].recomputed_share == 0
    assert runs["affinity"].recomputed_share < 0.05 < runs["round robin"].recomputed_share
    assert runs["affinity"].p99 <= runs["ring hash"].p99


def test_the_bound_of_affinity_protects_a_holder() -> None:
    """An image that is asked about more often than one engine answers is known by several."""
    workload = Workload(steady(6000), hot_share=0.95, num_hot=1)
    shares = {
        name: simulate(Run(10, workload, name, seconds=1.5, warm_up=0.5), COSTS).good_share
        for name in ("affinity", "affinity, unbounded")
    }
    assert shares["affinity"] > 0.99
    assert shares["affinity, unbounded"] < 0.9


def test_the_record_is_of_these_costs() -> None:
    """The recorded fleet had the costs that today's records give."""
    recorded = RECORDS.figures("fleet")["costs"]
    now = dataclasses.asdict(COSTS)
    assert {name: pytest.approx(value) for name, value in now.items()} == {
        name: tuple(value) if isinstance(value, list) else value for name, value in recorded.items()
    }


# ---------------------------------------------------------------- autoscaling


def scaled(signal: str) -> tuple[int, int, int]:
    """Engines for ten times the first requests, at most and at last, and for the first again."""
    clock = Clock()
    fleet = Fleet(clock, COSTS, POLICIES["two choices"](random.Random(0), COSTS.image), 0, "rate")
    fleet.add(2)
    workload = Workload(lambda now: 200.0 if 30 <= now < 150 else 20.0)
    Source(clock, workload, random.Random(0), fleet.send)
    fleet.measure()
    scaler = Autoscaler(fleet, Scaling(signal, hold=40.0, start_up=(20.0, 40.0)), 0)
    clock.run(145.0)
    settled = fleet.num_serving
    clock.run(240.0)
    return scaler.peak, settled, fleet.num_serving


def test_the_autoscaler_reaches_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 requests a second of 14.3 ms need 4.1 engines that are busy for 70 % of the time."""
    assert scaled("demand") == (5, 5, 1)
    monkeypatch.setattr(Fleet, "num_starting", 0)  # a planted fault: starts are forgotten
    most, *_ = scaled("demand")
    assert most > 5


# ---------------------------------------------------------------- engine and routers


def test_the_engine_is_within_a_tenth_of_the_record() -> None:
    """Answers a second and P50 of 1 and 64 callers; most cells had no part in the parameters."""
    cells = list(validate.compare(RECORDS, {"h200/e2e": (1, 64)}, predicted=()))
    assert sum(not cell.fitted for cell in cells) == 4
    for cell in cells:
        assert cell.simulated_per_second == pytest.approx(cell.measured_per_second, rel=0.1)
        assert cell.simulated_p50_ms == pytest.approx(cell.measured_p50_ms, rel=0.1)


class _Ends:
    """Outcomes that are kept."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.ends: list[tuple[Request, float]] = []

    def answered(self, request: Request) -> None:
        self.ends.append((request, self.clock.now))

    refused = expired = lost = answered

    def computed(self, picture: Picture) -> None:
        pass


def lone_engine() -> tuple[Clock, _Ends, SimulatedEngine]:
    clock = Clock()
    ends = _Ends(clock)
    return clock, ends, SimulatedEngine(0, clock, COSTS, ends)


def test_a_request_waits_for_a_step_and_not_for_an_answer() -> None:
    """Steps that are one event are cut when a request arrives among them."""
    clock, ends, engine = lone_engine()
    long = Request(0.0, 9.0, Picture(1), 1000)
    engine.submit(long)
    clock.run(0.3)
    short = Request(0.3, 9.0, Picture(1), 1)
    engine.submit(short)
    clock.run(9.0)
    (first, end), (last, _) = ends.ends
    assert (first, last) == (short, long)
    alone = COSTS.host_call + COSTS.transit_in + COSTS.transit_out + COSTS.launch(2, 1, 19, 0)
    assert alone < end - 0.3 <= alone + COSTS.steps[1]


def test_an_engine_keeps_as_many_pictures_as_fit() -> None:
    """The picture that was used least recently is computed again."""
    clock, _, engine = lone_engine()
    for key in (*range(COSTS.num_pictures + 1), 1, 0):
        engine.submit(Request(clock.now, clock.now + 9.0, Picture(key), 1))
        clock.run(clock.now + 1.0)
    assert engine.num_hits == 1
    assert len(engine.cache) == COSTS.num_pictures


def engines(number: int) -> list[SimulatedEngine]:
    clock = Clock()
    return [SimulatedEngine(index, clock, COSTS, _Ends(clock)) for index in range(number)]


def test_a_ring_moves_the_pictures_of_the_lost_engine_only() -> None:
    """Consistent hashing: others keep their engine."""
    ring, members = RingHash(random.Random(0)), engines(20)
    requests = [Request(0.0, 1.0, Picture(key), 3) for key in range(2000)]
    ring.set_engines(members)
    before = [ring.choose(request) for request in requests]
    ring.set_engines(members[1:])
    after = [ring.choose(request) for request in requests]
    moved = [one for one, other in zip(before, after, strict=True) if one is not other]
    assert set(moved) == {members[0]}
    assert len(moved) < 300


def test_a_bounded_ring_spreads_a_popular_picture() -> None:
    """No engine has more than the factor times the mean, and one more."""
    ring, members = RingHash(random.Random(0), 1.25), engines(8)
    ring.set_engines(members)
    popular = Picture(7)
    for _ in range(400):
        request = Request(0.0, 1.0, popular, 3)
        ring.choose(request).expect(request)
    assert max(engine.num_open for engine in members) <= 1.25 * (400 / 8 + 1)


def test_affinity_ends_where_waiting_costs_more_than_computing() -> None:
    """A busy holder is left for an idle engine, which becomes the holder."""
    router, members = Affinity(random.Random(0), COSTS.image), engines(2)
    router.set_engines(members)
    picture = Picture(1)
    holder = router.choose(Request(0.0, 1.0, picture, 3))
    assert router.choose(Request(0.0, 1.0, picture, 3)) is holder
    holder.expect(Request(0.0, 1.0, Picture(2), 3))
    other = router.choose(Request(0.0, 1.0, picture, 3))
    assert other is not holder
    assert picture.holder == other.index
