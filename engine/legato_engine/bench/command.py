"""`legato bench`: measure the gain from pipelining."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

import msgspec
import structlog
from rich.console import Console
from rich.table import Table

from legato_engine.bench.options import TABLES, bench_parser
from legato_engine.bench.workload import DEPTHS, MIN_LENGTH, Comparison, Workload, compare, measure
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import Assembly, assemble


def full_tables(rows: Sequence[Comparison], title: str) -> tuple[Table, Table]:
    return step_table(rows, title), speedup_table(rows, title)


def step_table(rows: Sequence[Comparison], title: str) -> Table:
    heads = ("forward ms", "sampling ms", "period ms", "idle ms", "tick ms", "wait ms")
    table = _table(f"A pipelined step: {title}", ("task", "streams", "context", *heads))
    for row in rows:
        cost = row.pipelined
        parts = (cost.forward, cost.sampling, cost.period, cost.idle, cost.tick, cost.wait)
        table.add_row(
            row.task, str(row.streams), str(row.context), *(f"{part:.3f}" for part in parts)
        )
    return table


def speedup_table(rows: Sequence[Comparison], title: str) -> Table:
    heads = (
        *("task", "streams", "blocking ms", "pipelined ms", "L", "predicted", "observed"),
        *("blocking tok/s", "pipelined tok/s", "blocking idle ms"),
    )
    table = _table(f"Blocking and pipelined: {title}", heads)
    for row in rows:
        table.add_row(
            row.task,
            str(row.streams),
            f"{row.blocking.period:.3f}",
            f"{row.pipelined.period:.3f}",
            str(row.length),
            f"{row.predicted - 1:+.1%}",
            f"{row.observed - 1:+.1%}",
            *(f"{row.tokens_per_second[depth]:.0f}" for depth in DEPTHS),
            f"{row.blocking.idle:.3f}",
        )
    return table


def photon_tables(rows: Sequence[Comparison], title: str) -> tuple[Table, Table]:
    """Return the tables of Photon's article on pipelined decoding, with its rounding."""
    parts = _table(title, ("", "forward (ms)", "sampling (ms)", "period (ms)"))
    heads = ("", "blocking (ms)", "pipelined (ms)", "L", "predicted", "observed")
    gains = _table(title, heads)
    for row in rows:
        streams = "1 stream" if row.streams == 1 else f"{row.streams} streams"
        cost = row.pipelined
        parts.add_row(streams, f"{cost.forward:.2f}", f"{cost.sampling:.2f}", f"{cost.period:.2f}")
        gains.add_row(
            streams,
            f"{row.blocking.period:.2f}",
            f"{cost.period:.2f}",
            str(row.length),
            f"{row.predicted - 1:+.1%}",
            f"{row.observed - 1:+.1%}",
        )
    return parts, gains


def task_table(figures: Sequence[dict[str, float]], title: str) -> Table:
    others = ("detect ms", "detect over text", "json ms", "json over text")
    heads = ("streams", "context", "query ms", *others)
    table = _table(f"Constrained steps: {title}", heads)
    for row in figures:
        table.add_row(
            str(row["streams"]),
            str(row["context"]),
            f"{row['query_ms']:.3f}",
            f"{row['detect_ms']:.3f}",
            f"{row['detect_over_text']:.3f}",
            f"{row['json_ms']:.3f}",
            f"{row['json_over_text']:.3f}",
        )
    return table


def _table(title: str, heads: Sequence[str]) -> Table:
    table = Table(title=title)
    for head in heads:
        table.add_column(head, justify="right")
    return table


# ---------------------------------------------------------------- command

# The same requests run on the same loaded model at pipeline depth 1 (blocking) and 2, in
# interleaved repeats. The parts of a step are medians over full decode batches. The gain that the
# cost model predicts from them is shown with the gain observed in the decode phase, which excludes
# prefills (`legato_engine.bench.workload`).

_TABLES = dict(zip(TABLES, (full_tables, photon_tables), strict=True))
_TABLE_WIDTH = 120
_COMPARED = ("query", "detect", "json")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    config = model_config(arguments)
    max_streams = max(arguments.streams)
    config = msgspec.structs.replace(
        config,
        max_running=max_streams,
        max_waiting=config.max_waiting + max_streams,
        crops_per_launch=0,
    )
    assembly = assemble(config)
    if arguments.compare_tasks:
        context = arguments.context or common_context(assembly)
        rows = [
            row for task in _COMPARED for row in measure_task(assembly, arguments, task, context)
        ]
    else:
        rows = measure_task(assembly, arguments, arguments.task, arguments.context)
    console = Console()
    console.width = max(console.width, _TABLE_WIDTH)  # a pipe would wrap the columns
    compared = task_figures(rows) if arguments.compare_tasks else []
    if arguments.json:
        figures = {
            "model": msgspec.to_builtins(assembly.info),
            "task": "+".join(_COMPARED) if arguments.compare_tasks else arguments.task,
            "rows": [dataclasses.asdict(row) for row in rows],
            "detect_over_text": compared,
        }
        console.print_json(json.dumps(figures))
    else:
        title = f"{assembly.info.name}, {assembly.info.dtype}, {assembly.info.device}"
        console.print(*_TABLES[arguments.table](rows, title))
        if compared:
            console.print(task_table(compared, title))
    assembly.device.close()
    return 0


def measure_task(
    assembly: Assembly, arguments: argparse.Namespace, task: str, context: int
) -> list[Comparison]:
    """Return a row per number of streams.

    One stream is always measured, because a batch's row share is relative to it.
    """
    measured = [
        measure(
            assembly,
            task=task,
            streams=streams,
            length=arguments.length,
            context=context,
            repeats=arguments.repeats,
        )
        for streams in sorted({1, *arguments.streams})
    ]
    forward_single = measured[0].costs[2].forward
    return [compare(one, forward_single) for one in measured if one.streams in arguments.streams]


def common_context(assembly: Assembly) -> int:
    """Return the shortest context at which all compared tasks can start."""
    return max(
        Workload(assembly, kind=task, count=1, length=MIN_LENGTH).context for task in _COMPARED
    )


def task_figures(rows: Sequence[Comparison]) -> list[dict[str, float]]:
    periods = {(row.task, row.streams): row.pipelined.period for row in rows}
    figures = []
    for free in (row for row in rows if row.task == "query"):
        period = free.pipelined.period
        found = {"streams": free.streams, "context": free.context, "query_ms": period}
        for task in _COMPARED[1:]:
            found[f"{task}_ms"] = periods[task, free.streams]
            found[f"{task}_over_text"] = periods[task, free.streams] / period
        figures.append(found)
    return figures


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser()
    arguments = parser.parse_args(argv)
    if arguments.length < MIN_LENGTH:
        parser.error(f"--length is at least {MIN_LENGTH}")
    return arguments


def model_config(arguments: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        model=arguments.model,
        weights=arguments.weights,
        tokenizer=arguments.tokenizer,
        random_weights=arguments.random_weights,
        max_context=arguments.max_context,
        device=arguments.device,
        dtype=arguments.dtype,
        draft=arguments.draft,
        threads=arguments.threads,
        cuda_graphs=not arguments.no_cuda_graphs,
        decode_path="graph",  # decode loops have no pipeline to measure
    )


def log_to_stderr() -> None:
    """Log to stderr, because stdout is for figures."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
