"""How several service processes before one scheduler scale: the same load for each of them."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from legato_client.load.run import run

from benchmarks import cpu, record

SENDERS = 4  # connections for each process: the kernel spreads these, not calls


@dataclasses.dataclass(frozen=True, slots=True)
class Scaled:
    """Medians of one case with so many `processes`; CPU is in microseconds of what is counted."""

    case: str
    processes: int
    per_second: float
    p50_ms: float
    service_cpu_us: float  # of all service processes together
    engine_cpu_us: float
    engine_share: float  # of one core


def measure(
    server: Callable[[Sequence[str]], AbstractContextManager[Any]],
    asked: Sequence[Any],
    counts: Sequence[int],
    *,
    seconds: float,
    rounds: int,
) -> list[Scaled]:
    """Every case with every number of processes; what is asked at once grows with them."""
    found: list[Scaled] = []
    for count in counts:
        with server(("--processes", str(count))) as contender:
            time.sleep(1.0)  # others than the first may still be starting
            for case in asked:
                turns = [_turn(case, contender, count, seconds) for _ in range(rounds + 1)][1:]
                medians = (statistics.median(values) for values in zip(*turns, strict=True))
                found.append(Scaled(case.title, count, *medians))
    return found


def _turn(case: Any, contender: Any, count: int, seconds: float) -> tuple[float, ...]:
    """The figures of `Scaled`, in its order."""
    grown = dataclasses.replace(case, in_flight=case.in_flight * count)
    service = [contender.pid, *cpu.children(contender.pid)]
    service.remove(contender.engine)
    before = _used(service, contender.engine)
    seen = run(grown.plan(contender.target, seconds, SENDERS * count))
    if seen.errors:
        raise RuntimeError(f"{case.title} with {count} processes: {dict(seen.errors)}")
    after = _used(service, contender.engine)
    answers = seen.due * case.answers
    own, engine = (b - a for a, b in zip(before, after, strict=True))
    return (
        answers / seconds,
        seen.latency.percentile(50) * 1e3,
        1e6 * own / answers,
        1e6 * engine / answers,
        engine / seconds,
    )


def _used(service: Sequence[int], engine: int) -> tuple[float, float]:
    return sum(cpu.seconds(pid) for pid in service), cpu.seconds(engine)


def text(found: Sequence[Scaled]) -> list[str]:
    """How it scales, as Markdown."""
    if not found:
        return ["Several processes were not measured."]
    alone = {each.case: each.per_second for each in reversed(found)}
    rows = [
        [
            *(each.case, each.processes, f"{each.per_second:.0f}"),
            f"{each.per_second / alone[each.case]:.2f}",
            f"{each.p50_ms:.2f}",
            *(f"{value:.1f}" for value in (each.service_cpu_us, each.engine_cpu_us)),
            f"{each.engine_share:.0%}",
        ]
        for each in found
    ]
    times = ("a second", "of the first", "P50 ms")
    heads = ("request", "processes", *times, "CPU us: service", "engine", "engine's core")
    return ["Several service processes before one engine:", record.table(heads, rows)]
