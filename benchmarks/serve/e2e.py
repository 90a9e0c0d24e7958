"""End to end through gRPC on loopback: Query about images, from 1 to 64 callers at once.

Workloads: `new` (a new image in every call), `mix` (five questions for every three images) and
`cached` (one image in every call). Options after `--` go to `legato serve`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Iterator, Sequence

from legato_client.cli.demo import LocalServer

from benchmarks import record, shared_options
from benchmarks.image import charts
from benchmarks.serve.load import WORKLOADS, Ask, Cell, LoadProcesses

START_TIMEOUT = 300.0
CELLS = (("new", 3), ("cached", 3), ("mix", 3), ("mix", 30))  # workload, tokens an answer
HEADS = (
    *("workload", "tokens", "callers", "P50 ms", "P95 ms", "P99 ms", "requests/s"),
    *("image known", "prefix known", "load CPU"),
)
_KNOWN = 6  # times the calls where every image is known, each of which takes a fifth or less
_RECORDED = ("pictures", "pool", "seed", "load_processes")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A measured cell."""

    workload: str
    ask: Ask
    cell: Cell

    def figures(self) -> dict[str, object]:
        """Return the figures for the record."""
        head = {"workload": self.workload, "tokens": self.ask.tokens, "callers": self.ask.callers}
        return head | dataclasses.asdict(self.cell) | {"asked": self.ask.calls}

    def texts(self) -> list[str]:
        """Return the cells of the table, in the order of `HEADS`."""
        cell = self.cell
        times = (cell.p50, cell.p95, cell.p99, cell.per_second)
        shares = (cell.hit_share, cell.cached_share, cell.load_cpu)
        return [
            *(self.workload, str(self.ask.tokens), str(self.ask.callers)),
            *(f"{figure:.1f}" for figure in times),
            *(f"{share:.0%}" for share in shares),
        ]


def main(argv: Sequence[str]) -> int:
    """Start a server, send requests, record; 1 when a call failed."""
    arguments, serve = _parse(argv)
    end = time.monotonic() + arguments.total_seconds
    size = (arguments.width, arguments.height)
    pool = charts.jpegs(arguments.pictures, arguments.pool, size, arguments.seed)
    with LocalServer(serve) as server:
        server.wait_until_serving(START_TIMEOUT, lambda _: None)
        with LoadProcesses(server.target, pool, arguments.load_processes) as load:
            rows = list(measure(load, arguments, end))
    jpeg_bytes = statistics.fmean(len(image) for image in pool)
    figures = {
        "size": size,
        "jpeg_bytes": jpeg_bytes,
        **{name: getattr(arguments, name) for name in _RECORDED},
        "serve": serve,
        "rows": [row.figures() for row in rows],
    }
    failed = sum(row.cell.failed for row in rows)
    shown = f"{size[0]}x{size[1]} {arguments.pictures}s"
    title = f"Query through gRPC, {shown}: {' '.join(serve) or 'defaults'}"
    notes = (
        f"JPEGs of {jpeg_bytes / 1e3:.0f} kB; {arguments.load_processes} load processes, 'load "
        f"CPU' is the busiest one's share of a core; {failed} calls failed."
    )
    table = record.table(HEADS, [row.texts() for row in rows])
    record.write(arguments.name, title, figures, [table, "", notes])
    return 0 if failed == 0 else 1


def measure(load: LoadProcesses, arguments: argparse.Namespace, end: float) -> Iterator[Row]:
    """Measure one cell after another, until monotonic time `end`."""
    for workload, ask in asks(arguments):
        seconds = min(arguments.cell_seconds, end - time.monotonic())
        if seconds <= 0:
            print(f"no time left for {workload} by {ask.callers}", flush=True)
            continue
        row = Row(workload, ask, load.run(WORKLOADS[workload](ask), ask.callers, seconds))
        print("  ".join(row.texts()), flush=True)
        for error in row.cell.errors:
            print(f"failed: {error}", flush=True)
        yield row


def asks(arguments: argparse.Namespace) -> Iterator[tuple[str, Ask]]:
    """Return every cell to measure; no two share an image."""
    first = 1
    for workload, tokens in CELLS:
        if workload not in arguments.workloads or tokens not in arguments.tokens:
            continue
        for callers in arguments.callers:
            calls = arguments.calls or round(
                arguments.calls_scale * default_calls(workload, callers)
            )
            ask = Ask(callers=callers, calls=max(2, calls), tokens=tokens, first=first)
            first += 2 * ask.total
            yield workload, ask


def default_calls(workload: str, callers: int) -> int:
    """Return the number of timed calls: enough for a P95 of one caller, eight rounds of many."""
    return (64 + 8 * callers) * (_KNOWN if workload == "cached" else 1)


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks e2e", description=__doc__)
    parser.add_argument("--name", default="e2e", help="of the record")
    parser.add_argument("--width", type=int, default=850)
    parser.add_argument("--height", type=int, default=600)
    parser.add_argument(
        "--callers", type=shared_options.numbers, default=[1, 4, 16, 64], help="e.g. 1,64"
    )
    parser.add_argument(
        "--workloads",
        type=shared_options.names_of(WORKLOADS),
        default=list(WORKLOADS),
        help="e.g. new,mix",
    )
    parser.add_argument(
        "--tokens", type=shared_options.numbers, default=[3, 30], help="which of 3 and 30"
    )
    parser.add_argument("--calls", type=int, default=0, help="timed calls a cell; 0: by callers")
    parser.add_argument("--calls-scale", type=float, default=1.0, help="of what 0 gives")
    parser.add_argument("--cell-seconds", type=float, default=45.0, help="limit of one cell")
    parser.add_argument("--total-seconds", type=float, default=1800.0, help="limit of all cells")
    charts.add_option(parser)
    parser.add_argument("--pool", type=int, default=64, help="images, before stamping")
    parser.add_argument("--seed", type=int, default=0, help="of the images")
    cores = len(os.sched_getaffinity(0))
    default = min(4, max(1, cores // 4))
    parser.add_argument("--load-processes", type=int, default=default)
    arguments, serve = parser.parse_known_args(argv)
    return arguments, [option for option in serve if option != "--"]
