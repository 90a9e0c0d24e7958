"""The service of this checkout beside that of another one, around the null engine.

    python -m benchmarks beside FOLDER [--only Query] [--options=--metrics-listen=127.0.0.1:0]

Both servers run all the time and are asked in turns, so that they meet the same machine. FOLDER is
a worktree of the commit to compare with; it runs with this environment's packages. `same` is a
second server of this checkout, whose difference is the noise.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

from benchmarks import record
from benchmarks.serve.contenders import Contender, Sample, median, null_server, share_of
from benchmarks.serve.cost import compare
from benchmarks.serve.load import cases

_ROLES = ("service", "engine", "proto/gen", "clients/python")
HEADS = ("request", "server", "a second", "share", "service, us", "engine, us", "P50, ms")
_HERE = Path(__file__).parents[2]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks beside", description=__doc__)
    parser.add_argument("folder", type=Path, help="another checkout")
    parser.add_argument("--name", default="beside", help="of the record")
    parser.add_argument("--only", default="", help="the cases whose title holds this")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each server")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one turn")
    parser.add_argument("--senders", type=int, default=1, help="processes that ask")
    parser.add_argument("--length", type=int, default=200, help="answers of a stream")
    parser.add_argument("--options", default="", help="of this checkout's servers")
    arguments = parser.parse_args(argv)
    asked = [case for case in cases(arguments.length) if arguments.only in case.title]
    options = arguments.options.split()
    with (
        _server("beside", arguments.folder) as beside,
        _server("this", _HERE, options) as this,
        _server("same", _HERE, options) as same,
    ):
        contenders = (beside, this, same)
        turns = {case.title: compare(case, contenders, arguments) for case in asked}
    rows = [row for title, samples in turns.items() for row in _rows(title, samples)]
    figures = {
        title: {name: [dataclasses.asdict(each) for each in taken] for name, taken in kept.items()}
        for title, kept in turns.items()
    }
    title = "The service beside that of another commit"
    record.write(arguments.name, title, figures, [record.table(HEADS, rows)])
    return 0


@contextlib.contextmanager
def _server(name: str, folder: Path, options: Sequence[str] = ()) -> Iterator[Contender]:
    path = os.pathsep.join(str(folder.resolve() / role) for role in _ROLES)
    with mock.patch.dict(os.environ, PYTHONPATH=path), null_server(options) as server:
        yield dataclasses.replace(server, name=name)


def _rows(title: str, samples: Mapping[str, list[Sample]]) -> Iterator[tuple[str, ...]]:
    theirs = samples["beside"]
    for name, taken in samples.items():
        costs = [
            (_mean(taken, figure), _mean(theirs, figure)) for figure in ("cpu_us", "engine_cpu_us")
        ]
        service, engine = (f"{ours:.0f} ({100 * ours / base:.0f} %)" for ours, base in costs)
        calls, share = (
            f"{median(taken, 'per_second'):.0f}",
            f"{100 * share_of(theirs, taken):.0f} %",
        )
        yield title, name, calls, share, service, engine, f"{median(taken, 'p50_ms'):.2f}"


def _mean(samples: Sequence[Sample], figure: str) -> float:
    """Of all turns, because a short one has few ticks of a process's clock."""
    return statistics.fmean(getattr(each, figure) for each in samples)
