"""The runs of the record, by the question that they answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from benchmarks.fleet.autoscale import Scaling
from benchmarks.fleet.fleet import Faults
from benchmarks.fleet.routing import POLICIES
from benchmarks.fleet.simulate import Run
from benchmarks.fleet.workload import Workload, steady

MIX = 5 / 3  # questions about each picture, as in the workload `mix` of `benchmarks e2e`
_BASE, _PEAK = 10, 40  # engines' worth of requests before and in the rise
_RISE, _FALL, _END = 60.0, 300.0, 480.0  # seconds
_EACH = 50.0  # requests a second that are an engine's worth


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    """A run with the words that name its row; `per_engine` is the offered rate."""

    group: str
    name: str
    per_engine: float
    run: Run


def routing() -> Iterator[Scenario]:
    """Every policy, where pictures are new, where some return, and where a few are popular."""
    cells = (
        ("new", 62.0, Workload(steady(6200))),
        ("new, long answers", 50.0, Workload(steady(5000), long_share=0.1)),
        ("mix", 62.0, _mix(6200)),
        ("mix", 85.0, _mix(8500)),
        ("popular", 85.0, dataclasses.replace(_mix(8500), hot_share=0.3)),
    )
    for name, rate, workload in cells:
        for policy in POLICIES:
            yield Scenario("routing", name, rate, Run(100, workload, policy, seconds=15.0))


def sizes() -> Iterator[Scenario]:
    """From one engine to 10,000 at the same load each."""
    lengths = {1: (60.0, 5.0), 8: (60.0, 5.0), 100: (15.0, 5.0), 1000: (6.0, 4.0)}
    for engines, (seconds, warm_up) in (lengths | {10_000: (2.0, 1.5)}).items():
        for policy in ("round robin", "round robin, 16 proxies", "two choices", "affinity"):
            run = Run(engines, _mix(65.0 * engines), policy, seconds, warm_up)
            yield Scenario("sizes", "mix", 65.0, run)


def overload() -> Iterator[Scenario]:
    """More than the engines can do, by what they predict of waits."""
    for rate in (62.0, 72.0, 85.0, 140.0):
        for estimate in ("rows", "rate"):
            run = Run(20, Workload(steady(rate * 20)), "two choices", estimate=estimate)
            yield Scenario("overload", "new", rate, run)


def failures() -> Iterator[Scenario]:
    """An engine of 50 dies every 20 seconds; routers notice by refusals or by health checks."""
    for hangs, detection in ((False, 0.05), (False, 1.0), (True, 1.0), (True, 5.0)):
        faults = Faults(mean_life=1000.0, detection=detection, hangs=hangs)
        name = f"{'hang' if hangs else 'crash'}, noticed after {detection:g} s"
        for policy in ("round robin", "two choices", "ring hash", "affinity"):
            run = Run(50, _mix(50.0 * 50), policy, seconds=80.0, faults=faults)
            yield Scenario("failures", name, 50.0, run)


def scaling() -> Iterator[Scenario]:
    """Four times the requests for five minutes, by signal and time to start."""
    workload = Workload(_step)
    for start_up in ((30.0, 30.0), (120.0, 120.0)):
        for signal, estimate in (
            ("queue", "rows"),
            ("queue", "rate"),
            ("busy", "rate"),
            ("demand", "rate"),
        ):
            settings = Scaling(signal, start_up=start_up, min_engines=_BASE)
            run = Run(14, workload, "two choices", _END, scaling=settings, estimate=estimate)
            yield Scenario("scaling", f"{signal}, by {estimate}", _EACH, run)
    for engines in (_BASE * 14 // 10, _PEAK):
        run = Run(engines, workload, "two choices", _END, estimate="rate")
        yield Scenario("scaling", f"always {engines}", _EACH, run)


def every() -> list[Scenario]:
    """Return all scenarios of the record."""
    return [*routing(), *sizes(), *overload(), *failures(), *scaling()]


def shortened(scenario: Scenario, share: float) -> Scenario:
    """Return a scenario with fewer seconds; for trying out."""
    run = dataclasses.replace(scenario.run, seconds=scenario.run.seconds * share)
    return dataclasses.replace(scenario, run=run)


def _mix(rate: float) -> Workload:
    return Workload(steady(rate), mean_questions=MIX)


def _step(now: float) -> float:
    return _EACH * (_PEAK if _RISE <= now < _FALL else _BASE)
