"""Tables of what the service costs around an engine without a model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.publish.records import Records, Row, sources
from benchmarks.record import table


def service(records: Records) -> str:
    """Throughput of the service around an engine without a model, as shares of a bare server."""
    name = records.newest("serve_2cores_*", "cases", "processes")
    figures, rows = records.figures(name), []
    scaled = {(each["case"], each["processes"]): each["share"] for each in figures["processes"]}
    for case, turns in figures["cases"].items():
        rates = [turn["per_second"] for turn in turns["bare"]]
        shares = [_paired_share(turns["bare"], turns[server]) for server in ("inside", "legato")]
        shares += [scaled[case, processes] for processes in (1, 2)]
        rows.append([case, f"{statistics.median(rates):,.0f}", *(f"{each:.0%}" for each in shares)])
    heads = (
        "two cores, clients included",
        "bare grpc.aio server, calls or messages/s",
        "engine inside the service process",
        "engine process beside it",
        "eight callers, one service process",
        "eight callers, two service processes",
    )
    return table(heads, rows) + sources(records, name)


def idle_sessions(records: Records) -> str:
    """What idle sessions cost a Query."""
    name = records.newest("serve_2cores_*", "idle_sessions")
    rows = [
        [
            f"{each['sessions']:,}",
            *(f"{each[field]:.2f}" for field in ("p50", "p99", "max")),
            f"{each['bytes_each'] / 1024:.0f}" if each["sessions"] else "-",
        ]
        for each in records.figures(name)["idle_sessions"]
    ]
    heads = ("idle sessions", "Query P50 ms", "P99 ms", "max ms", "KiB a session")
    return table(heads, rows) + sources(records, name)


def _paired_share(bare: Sequence[Row], own: Sequence[Row]) -> float:
    """Return the median of the ratios of turns that were taken in pairs."""
    pairs = zip(bare, own, strict=True)
    ratios = [float(mine["per_second"] / theirs["per_second"]) for theirs, mine in pairs]
    return statistics.median(ratios)
