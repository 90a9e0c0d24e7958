"""Throughput of several service processes with one scheduler, from the same callers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

from benchmarks import record
from benchmarks.serve.contenders import Contender, Sample, median, share_of, take_turn
from benchmarks.serve.load import Case

SENDERS = 4
"""Connections for each process of the largest number: the kernel spreads these, not calls."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scaled:
    """Medians of one case with `processes` service processes; 0 is the bare server.

    CPU is in microseconds of what is counted; `share` is relative to the bare server in the turn
    before.
    """

    case: str
    processes: int
    share: float
    per_second: float
    p50_ms: float
    service_cpu_us: float  # of all service processes together
    engine_cpu_us: float
    engine_share: float  # of one core


def measure(
    bare: AbstractContextManager[Contender],
    server: Callable[[Sequence[str]], AbstractContextManager[Contender]],
    asked: Sequence[Case],
    counts: Sequence[int],
    *,
    seconds: float,
    rounds: int,
) -> list[Scaled]:
    """Measure every case in turns: the bare server, then ours with every number of processes."""
    if not counts:
        return []
    found: list[Scaled] = []
    with ExitStack() as running:
        contenders = {0: running.enter_context(bare)}
        for count in counts:
            contenders[count] = running.enter_context(server(("--processes", str(count))))
        time.sleep(1.0)  # worker processes may still be starting
        for case in asked:
            grown = dataclasses.replace(case, in_flight=case.in_flight * max(counts))
            turns: dict[int, list[Sample]] = {count: [] for count in contenders}
            for _ in range(rounds + 1):
                for count, contender in contenders.items():
                    turns[count].append(take_turn(grown, contender, seconds, SENDERS * max(counts)))
            found += _scaled(case.title, {count: each[1:] for count, each in turns.items()})
    return found


def _scaled(case: str, turns: dict[int, list[Sample]]) -> list[Scaled]:
    return [
        Scaled(
            case=case,
            processes=count,
            share=share_of(turns[0], own),
            per_second=median(own, "per_second"),
            p50_ms=median(own, "p50_ms"),
            service_cpu_us=median(own, "cpu_us"),
            engine_cpu_us=median(own, "engine_cpu_us"),
            engine_share=median(own, "engine_share"),
        )
        for count, own in turns.items()
    ]


def text(found: Sequence[Scaled]) -> list[str]:
    """Format the figures as Markdown."""
    if not found:
        return ["Several processes were not measured."]
    rows = [
        [
            *(each.case, each.processes or "bare", f"{each.per_second:.0f}"),
            f"{each.share:.0%}",
            f"{each.p50_ms:.2f}",
            *(f"{value:.1f}" for value in (each.service_cpu_us, each.engine_cpu_us)),
            f"{each.engine_share:.0%}",
        ]
        for each in found
    ]
    times = ("a second", "of bare", "P50 ms")
    heads = ("request", "processes", *times, "CPU us: service", "engine", "engine's core")
    return ["Several service processes before one engine:", record.table(heads, rows)]
