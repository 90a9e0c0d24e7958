"""One run of a fleet and its figures."""

from __future__ import annotations

import dataclasses
import random
import statistics

from benchmarks.fleet.autoscale import Autoscaler, Scaling
from benchmarks.fleet.clock import Clock
from benchmarks.fleet.costs import EngineCosts
from benchmarks.fleet.fleet import Faults, Fleet, Work
from benchmarks.fleet.routing import POLICIES
from benchmarks.fleet.workload import Source, Workload

_SETTLE = 10.0  # virtual seconds after the last request, longer than any deadline


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What to simulate; times are virtual seconds."""

    engines: int
    workload: Workload
    policy: str
    seconds: float = 20.0
    warm_up: float = 5.0
    seed: int = 0
    faults: Faults | None = None
    scaling: Scaling | None = None
    estimate: str = "rows"


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """Of the requests that arrived after the warm-up; shares are of them, or of busy seconds.

    `recomputed_share` and `wasted_share` are parts of the devices' busy time: pictures that another
    engine had computed, and work without a good answer. `predicted_share` is the median part of a
    wait of more than 50 ms that the engine's estimate had predicted. `peak_engines` and
    `mean_engines` include those that start.
    """

    sent: int
    good: int
    late: int
    failed: int
    in_flight: int
    goodput: float
    good_share: float
    p50: float
    p99: float
    predicted_share: float
    hit_share: float
    recomputed_share: float
    wasted_share: float
    busy_share: float
    lost: int
    mean_engines: float
    peak_engines: int
    events: int


def simulate(run: Run, costs: EngineCosts) -> Figures:
    """Run to the end of every request."""
    clock = Clock()
    router = POLICIES[run.policy](random.Random(f"router {run.seed}"), costs.image)
    fleet = Fleet(clock, costs, router, run.seed, run.estimate)
    fleet.add(run.engines)
    source = Source(clock, run.workload, random.Random(f"source {run.seed}"), fleet.send)
    clock.run(run.warm_up)
    if run.faults is not None:
        fleet.set_faults(run.faults)
    scaler = Autoscaler(fleet, run.scaling, run.seed) if run.scaling is not None else None
    fleet.measure()
    clock.run(run.warm_up + run.seconds)
    source.stop()
    work = fleet.work()
    clock.run(clock.now + _SETTLE)
    return _figures(run, fleet, work, scaler)


def _figures(run: Run, fleet: Fleet, work: Work, scaler: Autoscaler | None) -> Figures:
    counts, ordered = fleet.counts, sorted(fleet.latencies)
    last, busy = len(ordered) - 1, max(work.busy, 1e-9)
    return Figures(
        sent=counts.sent,
        good=counts.good,
        late=counts.late,
        failed=counts.failed,
        in_flight=fleet.in_flight,
        goodput=counts.good / run.seconds,
        good_share=counts.good / max(1, counts.sent),
        p50=ordered[last // 2] if ordered else 0.0,
        p99=ordered[int(last * 0.99)] if ordered else 0.0,
        predicted_share=statistics.median(fleet.predicted) if fleet.predicted else 0.0,
        hit_share=work.hits / max(1, work.hits + work.computed),
        recomputed_share=work.recomputed * fleet.costs.image / busy,
        wasted_share=counts.wasted_seconds / busy,
        busy_share=busy / max(work.engine_seconds, 1e-9),
        lost=counts.lost,
        mean_engines=work.engine_seconds / run.seconds,
        peak_engines=scaler.peak if scaler is not None else run.engines,
        events=fleet.clock.num_events,
    )
