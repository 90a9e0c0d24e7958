"""Tables of docs/scaling.md: the simulated fleet, and deployments by size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.fleet import sizing
from benchmarks.record import table
from benchmarks.records import Records, Row, sources

NAME = "fleet"
_MEASURED = ("h200/e2e", "h200/e2e_photos", "h200/e2e_all")


def validation(records: Records) -> str:
    """One simulated engine beside records of whole requests."""
    rows = []
    for each in records.figures(NAME)["validation"]:
        rates = (each["measured_per_second"], each["simulated_per_second"])
        times = (each["measured_p50_ms"], each["simulated_p50_ms"])
        source = records.link(each["record"]) if each["record"] else "not measured"
        rows.append(
            [
                f"{each['workload']}, {each['tokens']} tokens",
                str(each["callers"]),
                *(f"{value:,.0f}" if value else "-" for value in rates),
                _error(rates),
                *(f"{value:,.1f}" if value else "-" for value in times),
                _error(times),
                f"{source}, fitted" if each["fitted"] else source,
            ]
        )
    heads = ("workload", "callers", "answers/s", "simulated", "error")
    return table((*heads, "P50 ms", "simulated", "error", "record"), rows) + sources(
        records, NAME, *_MEASURED
    )


def routing(records: Records) -> str:
    """Every policy at 100 engines; each cell is good answers, P99 and known images."""
    return _by_case(
        records,
        "routing",
        lambda row: f"{_good(row)}, {row['p99'] * 1e3:.0f} ms, {row['hit_share']:.0%}",
        "100 engines: good answers, P99, known images",
    )


def sizes(records: Records) -> str:
    """Engines from 1 to 10,000 by policy."""
    rows = _rows(records, "sizes")
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    cells = {
        (row["engines"], row["policy"]): (
            f"{row['p99'] * 1e3:.0f} ms, {row['hit_share']:.0%}, {row['busy_share']:.0%}"
        )
        for row in rows
    }
    lines = [
        [f"{engines:,}", *(cells[engines, policy] for policy in policies)]
        for engines in dict.fromkeys(row["engines"] for row in rows)
    ]
    heads = (f"engines: P99, known images, busy at {rows[0]['offered']:.0f} requests/s each",)
    return table((*heads, *policies), lines) + sources(records, NAME)


def overload(records: Records) -> str:
    """More requests than the engines can answer, by their estimate of waits."""
    rows = _rows(records, "overload")
    cells = {(row["offered"], row["estimate"]): row for row in rows}
    lines = []
    for rate in dict.fromkeys(row["offered"] for row in rows):
        both = [cells[rate, estimate] for estimate in ("rows", "rate")]
        goodputs = [f"{row['goodput'] / row['engines']:.1f}" for row in both]
        lines.append([f"{rate:.0f}", *goodputs, *(f"{row['predicted_share']:.0%}" for row in both)])
    goodput = ("good answers/s each, by free rows", "by rate of starts")
    predicted = ("part of a wait predicted, by free rows", "by rate of starts")
    return table(("requests/s each", *goodput, *predicted), lines) + sources(records, NAME)


def failures(records: Records) -> str:
    """Good answers while engines die."""
    heads = "50 engines, one dies every 20 s: good answers, P99"
    return _by_case(
        records, "failures", lambda row: f"{_good(row)}, {row['p99'] * 1e3:.0f} ms", heads
    )


def scaling(records: Records) -> str:
    """What the number of engines follows, through a rise to four times the requests."""
    lines = [
        [
            row["case"].replace("queue, by rows", "queue, by free rows"),
            f"{row['start_up']:.0f} s" if row["start_up"] else "-",
            _good(row),
            f"{row['p50'] * 1e3:.0f}",
            f"{row['mean_engines']:.1f}",
            str(row["peak_engines"]),
            f"{row['busy_share']:.0%}",
        ]
        for row in _rows(records, "scaling")
    ]
    heads = ("signal", "to start", "good answers", "P50 ms", "mean engines", "most engines", "busy")
    return table(heads, lines) + sources(records, NAME)


def deployments(records: Records) -> str:
    """Cameras at frames a second, each frame a new image with one question."""
    lines = [sizing.deployment_row(records, *example) for example in sizing.EXAMPLES]
    return table(sizing.HEADS, lines) + sources(records, *sizing.SOURCES)


def example(records: Records) -> str:
    """One of the deployments, step by step."""
    lines = sizing.steps(records, *sizing.EXAMPLES[2])
    return table(
        ("100 cameras, five frames of 1920x1080 a second", "from", "need"), lines
    ) + sources(records, *sizing.SOURCES)


def limits(records: Records) -> str:
    """What a busy GPU needs of the rest of its host, by size of the image."""
    lines = [sizing.limit_row(records, frame) for frame in sizing.frames(records).values()]
    known = [
        (figures["jpeg_bytes"] / 1e3, row["per_second"])
        for name in ("h200/e2e", "h200/e2e_photos")
        for figures in (records.figures(name),)
        for row in (records.row(name, workload="cached", callers=64, tokens=3),)
    ]
    rates = " and ".join(f"{rate:,.0f} of {size:.0f} kB" for size, rate in known)
    few = sizing.ENVOY_CALLS / known[0][1]
    text = (
        f"\n\nQuestions about known images, a second, of one service process and one GPU: {rates}. "
        f"There {few:.1f} GPUs fill a proxy of {sizing.ENVOY_CALLS:,} calls a second."
    )
    return table(sizing.LIMIT_HEADS, lines) + text + sources(records, *sizing.SOURCES)


def _by_case(records: Records, group: str, cell: Callable[[Row], str], head: str) -> str:
    rows = _rows(records, group)
    names = {(row["case"], row["offered"]): _case(row) for row in rows}
    cells = {(_case(row), row["policy"]): cell(row) for row in rows}
    lines = [
        [policy, *(cells[name, policy] for name in names.values())]
        for policy in dict.fromkeys(row["policy"] for row in rows)
    ]
    return table((head, *names.values()), lines) + sources(records, NAME)


def _case(row: Row) -> str:
    return f"{row['case']}, {row['offered']:.0f}/s each"


def _rows(records: Records, group: str) -> list[Row]:
    return [row for row in records.rows(NAME) if row["group"] == group]


def _good(row: Row) -> str:
    share = f"{row['good_share']:.2%}"
    return "100%" if share == "100.00%" else share


def _error(pair: Sequence[float]) -> str:
    measured, simulated = pair
    return f"{simulated / measured - 1:+.0%}" if measured else "-"


TABLES: dict[str, Callable[[Records], str]] = {
    "fleet_deployments": deployments,
    "fleet_example": example,
    "fleet_failures": failures,
    "fleet_limits": limits,
    "fleet_overload": overload,
    "fleet_routing": routing,
    "fleet_scaling": scaling,
    "fleet_sizes": sizes,
    "fleet_validation": validation,
}
