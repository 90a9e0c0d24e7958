"""Load results: histograms, records, report."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from legato_client.load.plan import LoadPlan

_BITS = 7  # kept of a duration: buckets are at most 1/64 wide, relatively
PERCENTILES = (50.0, 90.0, 99.0, 99.9)


class DurationHistogram:
    """Counts of durations in seconds, in logarithmic buckets; percentiles err by 1.6% at most.

    The extremes and the sum are exact.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.count = 0
        self.total = 0.0
        self.maximum = 0.0
        self.minimum = math.inf

    def add(self, seconds: float) -> None:
        seconds = max(seconds, 0.0)
        self._counts[_rounded_up(seconds)] += 1
        self.count += 1
        self.total += seconds
        self.maximum = max(self.maximum, seconds)
        self.minimum = min(self.minimum, seconds)

    def merge(self, other: DurationHistogram) -> None:
        self._counts.update(other._counts)
        self.count += other.count
        self.total += other.total
        self.maximum = max(self.maximum, other.maximum)
        self.minimum = min(self.minimum, other.minimum)

    @property
    def mean(self) -> float:
        """0 when nothing was counted."""
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """Return a percentile in seconds; 0 when nothing was counted."""
        rank = math.ceil(self.count * percent / 100)
        seen = 0
        for nanoseconds in sorted(self._counts):
            seen += self._counts[nanoseconds]
            if seen >= rank:
                return min(max(nanoseconds / 1e9, self.minimum), self.maximum)
        return self.maximum

    def summary_ms(self) -> Mapping[str, float]:
        figures = {f"p{percent:g}": self.percentile(percent) for percent in PERCENTILES}
        figures = {"mean": self.mean, **figures, "max": self.maximum}
        return {"count": self.count, **{name: s * 1e3 for name, s in figures.items()}}


def _rounded_up(seconds: float) -> int:
    """Return nanoseconds with only their first bits, rounded up."""
    nanoseconds = math.ceil(seconds * 1e9)
    shift = max(nanoseconds.bit_length() - _BITS, 0)
    return -(-nanoseconds >> shift) << shift


@dataclasses.dataclass(slots=True)
class LoadResults:
    """Results of all requests due within the measurement window.

    `latency` runs to the last message and `first` to the first answer in it, both from when the
    request was due (in a closed loop: sent). `gap` is the time between two messages of one stream,
    `lag` how late the load itself sent. `messages` and `completed` count within the window,
    whenever their request was due. `errors` counts by reason.
    """

    latency: DurationHistogram = dataclasses.field(default_factory=DurationHistogram)
    first: DurationHistogram = dataclasses.field(default_factory=DurationHistogram)
    gap: DurationHistogram = dataclasses.field(default_factory=DurationHistogram)
    lag: DurationHistogram = dataclasses.field(default_factory=DurationHistogram)
    due: int = 0
    completed: int = 0
    messages: int = 0
    errors: Counter[str] = dataclasses.field(default_factory=Counter)
    cpu_share: float = 0.0  # fraction of a core, of the busiest sender

    def merge(self, other: LoadResults) -> None:
        for name in ("latency", "first", "gap", "lag"):
            getattr(self, name).merge(getattr(other, name))
        self.due += other.due
        self.completed += other.completed
        self.messages += other.messages
        self.errors.update(other.errors)
        self.cpu_share = max(self.cpu_share, other.cpu_share)

    def figures(self, seconds: float) -> dict[str, object]:
        """Return the results with durations in milliseconds; `seconds` is the window's length."""
        return {
            "seconds": seconds,
            "due": self.due,
            "failed": self.errors.total(),
            "errors": dict(self.errors),
            "requests_per_second": self.completed / seconds,
            "messages_per_second": self.messages / seconds,
            "latency_ms": self.latency.summary_ms(),
            "first_ms": self.first.summary_ms(),
            "gap_ms": self.gap.summary_ms(),
            "lag_ms": self.lag.summary_ms(),
            "sender_cpu_share": self.cpu_share,
        }


class Meter:
    """Recorder of what falls into the window, `opens` to `closes` of `time.monotonic()`."""

    def __init__(self, opens: float, closes: float) -> None:
        self.record = LoadResults()
        self._opens = opens
        self._closes = closes

    def counts(self, moment: float) -> bool:
        return self._opens <= moment < self._closes

    def expect(self, due: float) -> RequestMeasurement:
        return RequestMeasurement(self, due)


class RequestMeasurement:
    """Measurement of one request from its sender's view."""

    __slots__ = ("_counted", "_due", "_last", "_meter")

    def __init__(self, meter: Meter, due: float) -> None:
        self._meter = meter
        self._due = due
        self._counted = meter.counts(due)
        self._last = 0.0
        if self._counted:
            meter.record.due += 1
            meter.record.lag.add(time.monotonic() - due)

    def message(self, *, answers: bool) -> None:
        """Record a message; `answers` is False for one that only reports progress."""
        now = time.monotonic()
        record = self._meter.record
        if self._meter.counts(now):
            record.messages += 1
        if not (self._counted and answers):
            return
        if self._last:
            record.gap.add(now - self._last)
        else:
            record.first.add(now - self._due)
        self._last = now

    def end(self) -> None:
        now = time.monotonic()
        record = self._meter.record
        if self._meter.counts(now):
            record.completed += 1
        if self._counted:
            record.latency.add(now - self._due)

    def fail(self, reason: str) -> None:
        if self._counted:
            self._meter.record.errors[reason] += 1


# ---------------------------------------------------------------- report

LATE_MS = 5.0  # a P99 lag beyond this: the senders, not the server, were too slow
HEADS = ("", "count", "mean ms", *(f"P{percent:g} ms" for percent in PERCENTILES), "max ms")


def rows(record: LoadResults) -> list[list[str]]:
    named = (
        ("latency", record.latency),
        ("first answer", record.first if record.gap.count else DurationHistogram()),
        ("between answers", record.gap),
        ("sent late by", record.lag),
    )
    return [[name, *_cells(histogram)] for name, histogram in named if histogram.count]


def summary(plan: LoadPlan, record: LoadResults) -> list[str]:
    how = (
        f"{plan.rate:g} requests a second, {plan.arrivals} arrivals (open loop)"
        if plan.rate
        else f"{plan.in_flight} in flight (closed loop)"
    )
    lines = [
        f"{plan.kind}: {how}, {plan.window:g} s measured after {plan.warm_up:g} s, "
        f"{plan.senders} sender process{'es' if plan.senders > 1 else ''}",
        f"{record.completed / plan.window:.1f} answers and {record.messages / plan.window:.1f} "
        f"messages a second; {record.errors.total()} of {record.due} requests failed",
    ]
    lines += [f"failed with {reason}: {count}" for reason, count in record.errors.most_common()]
    if plan.rate and record.lag.percentile(99) * 1e3 > LATE_MS:
        lines.append(
            f"the senders were late themselves (busiest: {record.cpu_share:.0%} of a core): "
            "use more processes or a lower rate"
        )
    return lines


def markdown(plan: LoadPlan, record: LoadResults) -> str:
    table = [HEADS, ["---"] * len(HEADS), *rows(record)]
    text = [f"# Load on {plan.target}", "", *summary(plan, record), ""]
    return "\n".join([*text, *(f"| {' | '.join(row)} |" for row in table), ""])


def _cells(histogram: DurationHistogram) -> Sequence[str]:
    figures = list(histogram.summary_ms().values())
    return [f"{figures[0]:.0f}", *(f"{figure:.3f}" for figure in figures[1:])]
