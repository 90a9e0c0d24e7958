"""Simulate a fleet of engines from measured costs, and record what routers and autoscalers do.

Nothing is measured on this machine: the record's figures are of a model, whose parameters are those
of earlier records. They are equal on every machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import lists, record
from benchmarks.fleet import scenarios, validate
from benchmarks.fleet.costs import EngineCosts, measured
from benchmarks.fleet.scenarios import Scenario
from benchmarks.fleet.simulate import Figures, simulate
from benchmarks.provenance import ROOT
from benchmarks.records import Records

GROUPS = ("routing", "sizes", "overload", "failures", "scaling")
COMPARED = ("record", "workload", "tokens", "callers", "answers/s", "simulated", "P50 ms", "sim.")
HEADS = (
    *("case", "engines", "policy", "offered/s each", "goodput/s each", "good", "P50 ms", "P99 ms"),
    *("known", "again", "wasted", "busy", "mean engines", "peak", "predicted"),
)


def main(argv: Sequence[str]) -> int:
    """Compare the model with records, run every scenario, and record."""
    arguments = _parse(argv)
    records = Records(ROOT)
    costs = measured(records)
    compared = list(validate.compare(records))
    rows = [
        _run(scenarios.shortened(scenario, arguments.share), costs)
        for scenario in scenarios.every()
        if scenario.group in arguments.groups and scenario.run.engines <= arguments.max_engines
    ]
    figures = {
        "costs": dataclasses.asdict(costs),
        "validation": [dataclasses.asdict(each) for each in compared],
        "rows": rows,
    }
    tables = [record.table(COMPARED, [_compared(each) for each in compared]), ""]
    for group in arguments.groups:
        table = record.table(HEADS, [_texts(row) for row in rows if row["group"] == group])
        tables += [f"{group}:", "", table, ""]
    record.write(arguments.name, "A simulated fleet of H200s, Moondream 2", figures, tables)
    return 0


def _run(scenario: Scenario, costs: EngineCosts) -> dict[str, Any]:
    start = time.perf_counter()
    figures = simulate(scenario.run, costs)
    seconds = time.perf_counter() - start
    row = _row(scenario, figures)
    print(f"{seconds:6.1f} s  " + "  ".join(_texts(row)), flush=True)
    return row


def _row(scenario: Scenario, figures: Figures) -> dict[str, Any]:
    run = scenario.run
    head = {"group": scenario.group, "case": scenario.name, "offered": scenario.per_engine}
    settings = {
        "engines": run.engines,
        "policy": run.policy,
        "seconds": run.seconds,
        "seed": run.seed,
        "estimate": run.estimate,
        "start_up": run.scaling.start_up[0] if run.scaling else None,
    }
    return head | settings | dataclasses.asdict(figures)


def _texts(row: dict[str, Any]) -> list[str]:
    name = f"{row['case']}, {row['start_up']:.0f} s to start" if row["start_up"] else row["case"]
    shares = ("hit_share", "recomputed_share", "wasted_share", "busy_share")
    return [
        *(name, f"{row['engines']:,}", row["policy"], f"{row['offered']:.0f}"),
        *(f"{row['goodput'] / row['engines']:.1f}", f"{row['good_share']:.2%}"),
        *(f"{row[field] * 1e3:.0f}" for field in ("p50", "p99")),
        *(f"{row[field]:.1%}" for field in shares),
        *(f"{row['mean_engines']:.1f}", str(row["peak_engines"])),
        f"{row['predicted_share']:.0%}",
    ]


def _compared(each: validate.Comparison) -> list[str]:
    rates = (each.measured_per_second, each.simulated_per_second)
    times = (each.measured_p50_ms, each.simulated_p50_ms)
    name = each.record or "not measured"
    cell = [f"{name} (fitted)" if each.fitted else name, each.workload, each.tokens, each.callers]
    return [*map(str, cell), *(f"{value:.1f}" if value else "-" for value in (*rates, *times))]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks fleet", description=__doc__)
    parser.add_argument("--name", default="fleet", help="of the record")
    parser.add_argument(
        "--groups", type=lists.names_of(GROUPS), default=GROUPS, help=f"of {','.join(GROUPS)}"
    )
    parser.add_argument("--share", type=float, default=1.0, help="of each run's virtual time")
    parser.add_argument("--max-engines", type=int, default=10_000, help="of a run")
    return parser.parse_args(argv)
