"""The figures of a benchmark as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from legato_engine.bench.decode_phase import DEPTHS, Comparison


def full_tables(rows: Sequence[Comparison], title: str) -> tuple[Table, Table]:
    """Return both tables: the parts of a step, and blocking against pipelined."""
    return step_table(rows, title), speedup_table(rows, title)


def step_table(rows: Sequence[Comparison], title: str) -> Table:
    """Return a table of the parts of a pipelined step."""
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
    """Return a table of the decode phase, blocking and pipelined, predicted and observed."""
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
    """Return the two tables of Photon's article on pipelined decoding, with its rounding."""
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
    """Return a table of `command.task_figures`: constrained steps against free ones."""
    heads = ("streams", "context", "query ms", "detect ms", "detect over text")
    table = _table(f"Constrained steps: {title}", heads)
    for row in figures:
        table.add_row(
            str(row["streams"]),
            str(row["context"]),
            f"{row['query_ms']:.3f}",
            f"{row['detect_ms']:.3f}",
            f"{row['detect_over_text']:.3f}",
        )
    return table


def _table(title: str, heads: Sequence[str]) -> Table:
    table = Table(title=title)
    for head in heads:
        table.add_column(head, justify="right")
    return table
