"""What several service processes before one scheduler bring: all are asked by the same callers."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

from legato_client.load.run import run

from benchmarks import record
from benchmarks.contenders import Contender
from benchmarks.serve_cases import Case

SENDERS = 4
"""Connections for each process of the largest number: the kernel spreads these, not calls."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scaled:
    """Medians of one case with so many `processes`, 0 for the bare server.

    CPU is in microseconds of what is counted, `share` of what the bare server gave in the turn
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
    """Every case in turns: the bare server, then ours with every number of processes."""
    if not counts:
        return []
    found: list[Scaled] = []
    with ExitStack() as running:
        contenders = {0: running.enter_context(bare)}
        for count in counts:
            contenders[count] = running.enter_context(server(("--processes", str(count))))
        time.sleep(1.0)  # others than the first may still be starting
        for case in asked:
            grown = dataclasses.replace(case, in_flight=case.in_flight * max(counts))
            turns: dict[int, list[tuple[float, ...]]] = {count: [] for count in contenders}
            for _ in range(rounds + 1):
                for count, contender in contenders.items():
                    turns[count].append(_turn(grown, contender, seconds, SENDERS * max(counts)))
            found += _medians(case.title, {count: each[1:] for count, each in turns.items()})
    return found


def _medians(case: str, turns: dict[int, list[tuple[float, ...]]]) -> list[Scaled]:
    """Turns that met the same machine are compared, as in `serve`."""
    found = []
    for count, own in turns.items():
        pairs = zip(own, turns[0], strict=True)
        share = statistics.median(ours[0] / theirs[0] for ours, theirs in pairs)
        medians = (statistics.median(values) for values in zip(*own, strict=True))
        found.append(Scaled(case, count, share, *medians))
    return found


def _turn(case: Case, contender: Contender, seconds: float, senders: int) -> tuple[float, ...]:
    """The figures of `Scaled` behind `share`, in its order."""
    before = contender.used()
    seen = run(case.plan(contender.target, seconds, senders))
    if seen.errors:
        raise RuntimeError(f"{case.title} on {contender.name}: {dict(seen.errors)}")
    after = contender.used()
    answers = seen.due * case.answers
    own, engine = (b - a for a, b in zip(before, after, strict=True))
    return (
        answers / seconds,
        seen.latency.percentile(50) * 1e3,
        1e6 * own / answers,
        1e6 * engine / answers,
        engine / seconds,
    )


def text(found: Sequence[Scaled]) -> list[str]:
    """How it scales, as Markdown."""
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
