"""Turns of `serve`: samples of one contender, and their comparison."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from legato_client.load.report import Record
from legato_client.load.run import run

from benchmarks.serve.cases import Case
from benchmarks.serve.contenders import Contender


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One turn of one contender.

    `per_second` and CPU, in microseconds, are of what the case counts: calls, or answers of
    streams. Our server merges words that it cannot send in time, and never points.
    """

    per_second: float
    p50_ms: float
    cpu_us: float
    engine_cpu_us: float
    sender_cpu_share: float
    messages_per_request: float

    @property
    def engine_share(self) -> float:
        """Share of a core that the engine used."""
        return self.engine_cpu_us * self.per_second / 1e6


def take_turn(case: Case, contender: Contender, seconds: float, senders: int) -> Sample:
    """Load one contender for `seconds`.

    Raises:
        RuntimeError: A request failed.
    """
    before = contender.used()
    seen: Record = run(case.plan(contender.target, seconds, senders))
    if seen.errors:
        raise RuntimeError(f"{case.title} on {contender.name}: {dict(seen.errors)}")
    after = contender.used()
    answers = seen.due * case.answers
    own, engine = (1e6 * (b - a) / answers for a, b in zip(before, after, strict=True))
    messages = (seen.first.count + seen.gap.count) / seen.due + case.streams  # and `started`
    return Sample(
        per_second=seen.messages / messages * case.answers / seconds,
        p50_ms=seen.latency.percentile(50) * 1e3,
        cpu_us=own,
        engine_cpu_us=engine,
        sender_cpu_share=seen.cpu_share,
        messages_per_request=messages,
    )


def median(turns: Sequence[Sample], field: str) -> float:
    """Return the median of one figure."""
    return float(statistics.median(getattr(turn, field) for turn in turns))


def share_of(theirs: Sequence[Sample], ours: Sequence[Sample]) -> float:
    """Return the median ratio of ours to theirs, by turns; both of a pair met the same load."""
    pairs = zip(theirs, ours, strict=True)
    return statistics.median(own.per_second / other.per_second for other, own in pairs)
