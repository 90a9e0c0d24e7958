"""Values of a server's option beside each other, each a whole server, through gRPC on loopback.

    python -m benchmarks paths -- --device cuda --model moondream2 --random-weights
    python -m benchmarks paths --option pipeline-depth --values 1,2 --name depth -- --device cpu

By default these are the decode paths. The servers share the device, run all the time and are asked
in turns, so that they meet the same machine; one that is not asked has no work. `engine ms` is the
CPU time of the engine's process for an answer.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from legato_client.cli.demo import LocalServer

from benchmarks import record, shared_options
from benchmarks.image import charts
from benchmarks.serve import load
from benchmarks.serve.e2e import START_TIMEOUT, default_calls
from benchmarks.serve.load import WORKLOADS, Ask, Cell, LoadProcesses

Row = dict[str, Any]
VALUES = ("graph", "loop")
_APART = 100_000  # images of one turn, at most
HEADS = ("request", "callers", "server", "P50 ms", "answers/s", "engine ms")


class Kind(NamedTuple):
    """What callers ask, and how many at once."""

    name: str
    workload: str
    tokens: int
    callers: tuple[int, ...]
    detects: bool = False


KINDS = (
    Kind("new image, 3 tokens", "new", 3, (1, 8, 64)),
    Kind("new image, 30 tokens", "new", 30, (1, 8)),
    Kind("known image, 3 tokens", "cached", 3, (1, 8)),
    Kind("known image, 30 tokens", "cached", 30, (1, 8, 64)),
    Kind("known image, 10 objects", "cached", 30, (1, 8), detects=True),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one server; `engine_ms` is a mean over all answers of the turn."""

    cell: Cell
    engine_ms: float


class Contender:
    """A server with one value of the option, and its callers."""

    def __init__(self, server: LocalServer, load: LoadProcesses) -> None:
        self._server, self._load = server, load

    def turn(self, kind: Kind, ask: Ask, seconds: float) -> Turn:
        jobs = WORKLOADS[kind.workload](ask)
        if kind.detects:
            jobs = [dataclasses.replace(job, detects=True) for job in jobs]
        engine = load.engine(self._server.pid)
        before = load.seconds(engine)
        cell = self._load.run(jobs, ask.callers, seconds)
        return Turn(cell, (load.seconds(engine) - before) / max(1, cell.answered) * 1e3)


def main(argv: Sequence[str]) -> int:
    """Measure, record; 1 when a call failed."""
    arguments, serve = _parse(argv)
    pool = charts.jpegs("chart", 64, (850, 600), 0)
    share = f"{0.8 / len(arguments.values):.2f}"
    rows: list[Row] = []
    numbers = itertools.count(1, _APART)
    with contextlib.ExitStack() as stack:
        servers = {
            value: stack.enter_context(
                LocalServer([*serve, f"--{arguments.option}", value, "--kv-memory-fraction", share])
            )
            for value in arguments.values
        }
        contenders = {}
        for value, server in servers.items():
            server.wait_until_serving(START_TIMEOUT, lambda _: None)
            load = LoadProcesses(server.target, pool, arguments.load_processes)
            contenders[value] = Contender(server, stack.enter_context(load))
        for kind, callers in _cells(arguments.only):
            rows.append(_measure(contenders, kind, callers, arguments, numbers))
            print(*(" | ".join(line) for line in _lines(rows[-1])), sep="\n", flush=True)
    failed = sum(
        turn["failed"] for row in rows for turns in row["turns"].values() for turn in turns
    )
    table = record.table(HEADS, [line for row in rows for line in _lines(row)])
    figures = {"serve": serve, "option": arguments.option, "rows": rows}
    title = f"--{arguments.option} through gRPC, 850x600 charts: {' '.join(serve) or 'defaults'}"
    record.write(arguments.name, title, figures, [table, "", f"{failed} calls failed."])
    return 0 if failed == 0 else 1


def _measure(
    contenders: dict[str, Contender],
    kind: Kind,
    callers: int,
    arguments: argparse.Namespace,
    numbers: Iterator[int],
) -> Row:
    """Measure the turns of every server; odd ones in the other order."""
    turns: dict[str, list[dict[str, Any]]] = {value: [] for value in contenders}
    calls = round(arguments.calls_scale * default_calls(kind.workload, callers))
    for index in range(arguments.turns):
        order = list(contenders) if index % 2 == 0 else list(contenders)[::-1]
        ask = Ask(callers=callers, calls=max(2, calls), tokens=kind.tokens, first=next(numbers))
        for value in order:
            turn = contenders[value].turn(kind, ask, arguments.cell_seconds)
            turns[value].append(dataclasses.asdict(turn.cell) | {"engine_ms": turn.engine_ms})
    return {"request": kind.name, "callers": callers, "turns": turns}


def _cells(only: str) -> Iterator[tuple[Kind, int]]:
    return ((kind, callers) for kind in KINDS if only in kind.name for callers in kind.callers)


def _lines(row: Row) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for value, turns in row["turns"].items():
        medians = {
            name: statistics.median(turn[name] for turn in turns)
            for name in ("p50", "per_second", "engine_ms")
        }
        lines.append(
            (
                *(str(row["request"]), str(row["callers"]), value, f"{medians['p50']:.2f}"),
                f"{medians['per_second']:.1f}",
                f"{medians['engine_ms']:.2f}",
            )
        )
    return lines


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks paths", description=__doc__)
    parser.add_argument("--name", default="paths", help="of the record")
    parser.add_argument("--option", default="decode-path", help="of `legato serve`")
    parser.add_argument("--values", default=VALUES, type=shared_options.names, help="e.g. 1,2")
    parser.add_argument("--turns", type=int, default=2, help="of each server in each cell")
    parser.add_argument("--calls-scale", type=float, default=1.0, help="of the timed calls")
    parser.add_argument("--cell-seconds", type=float, default=10.0, help="limit of one turn")
    parser.add_argument("--only", default="", help="requests whose name has this in it")
    parser.add_argument("--load-processes", type=int, default=4)
    arguments, serve = parser.parse_known_args(argv)
    return arguments, [option for option in serve if option != "--"]
