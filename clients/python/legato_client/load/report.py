"""A load's figures as text."""

from __future__ import annotations

from collections.abc import Sequence

from legato_client.load.histogram import PERCENTILES, Histogram
from legato_client.load.plan import Plan
from legato_client.load.record import Record

LATE_MS = 5.0  # a P99 lag beyond this: the senders, not the server, were too slow
HEADS = ("", "count", "mean ms", *(f"P{percent:g} ms" for percent in PERCENTILES), "max ms")


def rows(record: Record) -> list[list[str]]:
    named = (
        ("latency", record.latency),
        ("first answer", record.first if record.gap.count else Histogram()),
        ("between answers", record.gap),
        ("sent late by", record.lag),
    )
    return [[name, *_cells(histogram)] for name, histogram in named if histogram.count]


def summary(plan: Plan, record: Record) -> list[str]:
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


def markdown(plan: Plan, record: Record) -> str:
    table = [HEADS, ["---"] * len(HEADS), *rows(record)]
    text = [f"# Load on {plan.target}", "", *summary(plan, record), ""]
    return "\n".join([*text, *(f"| {' | '.join(row)} |" for row in table), ""])


def _cells(histogram: Histogram) -> Sequence[str]:
    figures = list(histogram.summary_ms().values())
    return [f"{figures[0]:.0f}", *(f"{figure:.3f}" for figure in figures[1:])]
