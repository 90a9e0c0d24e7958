"""One engine beside several of one host, through gRPC: answers a second, and a lone caller's time.

The servers run at the same time and are measured in turns, so that a change of the machine meets
all alike: one engine on the first of `--devices`, one on each of them, and the same without
affinity. The first one shares its device with the others, which are idle in its turn. Options
after `--` go to every `legato serve`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from legato_client.cli.demo import LocalServer

from benchmarks import record, shared_options
from benchmarks.image import charts
from benchmarks.serve.load import WORKLOADS, Ask, Cell, LoadProcesses

START_TIMEOUT = 600.0
LONE = 1  # caller
HEADS = (
    *("workload", "callers", "server", "answers/s", "of one engine", "P50 ms", "P95 ms"),
    *("prefix known", "failed", "load CPU"),
)
ONE, ALL, NO_AFFINITY = "one engine", "{} engines", "{} engines, no affinity"


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A workload on one server, in all rounds; `gain` is the ratio of medians to one engine."""

    workload: str
    callers: int
    server: str
    cells: tuple[Cell, ...]
    gain: float

    def texts(self) -> list[str]:
        """Return the cells of the table, in the order of `HEADS`."""
        cells = self.cells
        return [
            *(self.workload, str(self.callers), self.server),
            *(f"{median(cells, 'per_second'):.1f}", f"{self.gain:.2f}"),
            *(f"{median(cells, name):.1f}" for name in ("p50", "p95")),
            f"{median(cells, 'cached_share'):.0%}",
            str(sum(each.failed for each in cells)),
            f"{max(each.load_cpu for each in cells):.0%}",
        ]


def median(cells: Sequence[Cell], name: str) -> float:
    """Return the median over the rounds."""
    middle: float = statistics.median(getattr(each, name) for each in cells)
    return middle


def servers(devices: str, processes: int, serve: Sequence[str]) -> dict[str, list[str]]:
    """Return the options of each server by its name."""
    names = devices.split(",")
    common = ["--processes", str(processes), *serve]
    return {
        ONE: ["--device", names[0], *common],
        ALL.format(len(names)): ["--devices", devices, *common],
        NO_AFFINITY.format(len(names)): ["--devices", devices, "--affinity", "off", *common],
    }


def main(argv: Sequence[str]) -> int:
    """Start the servers, send requests, record; 1 when a call failed."""
    arguments, serve = _parse(argv)
    size = (arguments.width, arguments.height)
    pool = charts.jpegs(arguments.pictures, arguments.pool, size, arguments.seed)
    options = servers(arguments.devices, arguments.processes, serve)
    loads: dict[str, LoadProcesses] = {}
    with ExitStack() as running:
        for name, each in options.items():
            server = running.enter_context(LocalServer(each))
            server.wait_until_serving(START_TIMEOUT, lambda _: None)
            loads[name] = running.enter_context(
                LoadProcesses(server.target, pool, arguments.load_processes)
            )
        rows = list(measure(loads, arguments))
    failed = sum(each.failed for row in rows for each in row.cells)
    figures = {
        "size": size,
        "devices": arguments.devices,
        "processes": arguments.processes,
        "rounds": arguments.rounds,
        "serve": serve,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    title = f"Several engines on {arguments.devices}: {' '.join(serve) or 'defaults'}"
    notes = (
        f"{size[0]}x{size[1]} {arguments.pictures}s, medians of {arguments.rounds} rounds in "
        f"turns; {arguments.load_processes} load processes; {failed} calls failed."
    )
    table = record.table(HEADS, [row.texts() for row in rows])
    record.write(arguments.name, title, figures, [table, "", notes])
    return 0 if failed == 0 else 1


def measure(loads: dict[str, LoadProcesses], arguments: argparse.Namespace) -> Iterator[Row]:
    """Measure every workload on all servers, then a lone caller's new images."""
    first = 1
    for workload, callers in _cells(arguments):
        calls = arguments.calls if callers > LONE else arguments.lone_calls
        found: dict[str, list[Cell]] = {name: [] for name in loads}
        for turn in range(arguments.rounds + 1):  # the first is not counted
            for name, load in loads.items():
                ask = Ask(callers=callers, calls=calls, tokens=arguments.tokens, first=first)
                first += 2 * ask.total  # no two turns share an image
                cell = load.run(WORKLOADS[workload](ask), callers, arguments.cell_seconds)
                for error in cell.errors:
                    print(f"failed: {error}", flush=True)
                if turn:
                    found[name].append(cell)
        rate = median(found[ONE], "per_second")
        for name, cells in found.items():
            gain = median(cells, "per_second") / rate if rate else 0.0
            row = Row(workload, callers, name, tuple(cells), gain)
            print("  ".join(row.texts()), flush=True)
            yield row


def _cells(arguments: argparse.Namespace) -> Iterator[tuple[str, int]]:
    for workload in arguments.workloads:
        yield workload, arguments.callers
    yield "new", LONE


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks devices", description=__doc__)
    parser.add_argument("--name", default="devices", help="of the record")
    parser.add_argument("--devices", default="cuda:0,cuda:1", help="with commas between")
    parser.add_argument("--processes", type=int, default=2, help="service processes")
    parser.add_argument("--width", type=int, default=850)
    parser.add_argument("--height", type=int, default=600)
    parser.add_argument("--callers", type=int, default=128)
    parser.add_argument(
        "--workloads",
        type=shared_options.names_of(WORKLOADS),
        default=["new", "mix"],
        help="e.g. new,mix",
    )
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--calls", type=int, default=1024, help="timed calls a turn")
    parser.add_argument("--lone-calls", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cell-seconds", type=float, default=60.0, help="limit of one turn")
    charts.add_option(parser)
    parser.add_argument("--pool", type=int, default=64, help="images, before stamping")
    parser.add_argument("--seed", type=int, default=0, help="of the images")
    default = min(8, max(1, len(os.sched_getaffinity(0)) // 4))
    parser.add_argument("--load-processes", type=int, default=default)
    arguments, serve = parser.parse_known_args(argv)
    return arguments, [option for option in serve if option != "--"]
