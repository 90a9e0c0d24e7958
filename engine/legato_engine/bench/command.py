"""`legato bench`: measure the gain from pipelining."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
import structlog
from rich.console import Console
from rich.table import Table

from legato_engine.bench.options import bench_parser
from legato_engine.bench.workload import MIN_LENGTH, Comparison, Workload, measure
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import Assembly, assemble

RowT = TypeVar("RowT")
Cells = Mapping[str, Callable[[RowT], str]]
"""Text of each column by its head."""

_TASK: Cells[Comparison] = {
    "task": lambda row: row.task,
    "streams": lambda row: str(row.streams),
}
_STEP: Cells[Comparison] = {
    **_TASK,
    "context": lambda row: str(row.context),
    "forward ms": lambda row: f"{row.pipelined.forward:.3f}",
    "sampling ms": lambda row: f"{row.pipelined.sampling:.3f}",
    "period ms": lambda row: f"{row.pipelined.period:.3f}",
    "idle ms": lambda row: f"{row.pipelined.idle:.3f}",
    "tick ms": lambda row: f"{row.pipelined.tick:.3f}",
    "wait ms": lambda row: f"{row.pipelined.wait:.3f}",
}
_GAIN: Cells[Comparison] = {
    "L": lambda row: str(row.length),
    "predicted": lambda row: f"{row.predicted - 1:+.1%}",
    "observed": lambda row: f"{row.observed - 1:+.1%}",
}
_SPEEDUP: Cells[Comparison] = {
    **_TASK,
    "blocking ms": lambda row: f"{row.blocking.period:.3f}",
    "pipelined ms": lambda row: f"{row.pipelined.period:.3f}",
    **_GAIN,
    "blocking tok/s": lambda row: f"{row.tokens_per_second[1]:.0f}",
    "pipelined tok/s": lambda row: f"{row.tokens_per_second[2]:.0f}",
    "blocking idle ms": lambda row: f"{row.blocking.idle:.3f}",
}
_PHOTON: Cells[Comparison] = {
    "": lambda row: "1 stream" if row.streams == 1 else f"{row.streams} streams"
}
_PHOTON_STEP: Cells[Comparison] = {
    **_PHOTON,
    "forward (ms)": lambda row: f"{row.pipelined.forward:.2f}",
    "sampling (ms)": lambda row: f"{row.pipelined.sampling:.2f}",
    "period (ms)": lambda row: f"{row.pipelined.period:.2f}",
}
_PHOTON_GAIN: Cells[Comparison] = {
    **_PHOTON,
    "blocking (ms)": lambda row: f"{row.blocking.period:.2f}",
    "pipelined (ms)": lambda row: f"{row.pipelined.period:.2f}",
    **_GAIN,
}
_CONSTRAINED: Cells[Mapping[str, float]] = {
    "streams": lambda row: str(row["streams"]),
    "context": lambda row: str(row["context"]),
    "query ms": lambda row: f"{row['query_ms']:.3f}",
    "detect ms": lambda row: f"{row['detect_ms']:.3f}",
    "detect over text": lambda row: f"{row['detect_over_text']:.3f}",
    "json ms": lambda row: f"{row['json_ms']:.3f}",
    "json over text": lambda row: f"{row['json_over_text']:.3f}",
}


_TABLES: Mapping[str, tuple[tuple[str, Cells[Comparison]], ...]] = {
    "full": (("A pipelined step: ", _STEP), ("Blocking and pipelined: ", _SPEEDUP)),
    "photon": (("", _PHOTON_STEP), ("", _PHOTON_GAIN)),
}
"""Titles and columns; `photon` has those of Photon's article on pipelined decoding."""


def _table(title: str, rows: Sequence[RowT], cells: Cells[RowT]) -> Table:
    table = Table(title=title)
    for head in cells:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*(cell(row) for cell in cells.values()))
    return table


# ---------------------------------------------------------------- command

# The same requests run on the same loaded model at pipeline depth 1 (blocking) and 2, in
# interleaved repeats. The parts of a step are medians over full decode batches. The gain that the
# cost model predicts from them is shown with the gain observed in the decode phase, which excludes
# prefills (`legato_engine.bench.workload`).

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
        tables = _TABLES[arguments.table]
        console.print(*(_table(head + title, rows, cells) for head, cells in tables))
        if compared:
            console.print(_table(f"Constrained steps: {title}", compared, _CONSTRAINED))
    assembly.device.close()
    return 0


def measure_task(
    assembly: Assembly, arguments: argparse.Namespace, task: str, context: int
) -> list[Comparison]:
    """Return a row per number of streams.

    One stream is always measured, because a batch's row share is relative to it.
    """
    rows: list[Comparison] = []
    for streams in sorted({1, *arguments.streams}):
        rows.append(
            measure(
                assembly,
                task=task,
                streams=streams,
                length=arguments.length,
                context=context,
                repeats=arguments.repeats,
                forward_single=rows[0].pipelined.forward if rows else 0.0,
            )
        )
    return [row for row in rows if row.streams in arguments.streams]


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


if __name__ == "__main__":
    log_to_stderr()
    sys.exit(main())
