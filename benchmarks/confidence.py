"""What certainties cost a decode step: this tree beside another, in turns on one GPU.

    python -m benchmarks confidence --other FOLDER --other-commit HASH

`other` is a checkout from before them. Each round measures both trees, in changing order.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import record

ROOT = Path(__file__).parent.parent
CHILD = Path(__file__).with_name("step_values.py")
ROWS = (1, 32)
PACKAGES = ("proto/gen", "engine", "engine/tiny", "service", "clients/python")


class Tree:
    """A child that runs one tree's engine."""

    def __init__(self, root: Path) -> None:
        paths = [*(str(root / each) for each in PACKAGES), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(CHILD)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_until_ready(self) -> None:
        self._line()

    def microseconds(self, rows: int) -> float:
        assert self._process.stdin is not None, "its input is a pipe"
        print(rows, file=self._process.stdin, flush=True)
        return float(self._line())

    def close(self) -> None:
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None, "its output is a pipe"
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"a tree ended with {self._process.wait()}")
        return line


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path, required=True)
    parser.add_argument("--other-commit", required=True)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args(arguments)
    trees = {"before": Tree(args.other), "with certainties": Tree(ROOT)}
    for tree in trees.values():
        tree.wait_until_ready()
    taken: dict[tuple[str, int], list[float]] = {(n, r): [] for n in trees for r in ROWS}
    for turn in range(args.rounds):
        for name in list(trees)[:: 1 if turn % 2 else -1]:
            for rows in ROWS:
                taken[name, rows].append(trees[name].microseconds(rows))
    for tree in trees.values():
        tree.close()
    table = []
    for rows in ROWS:
        before, after = (taken[name, rows] for name in trees)
        more = [b / a - 1 for a, b in zip(before, after, strict=True)]
        table.append(
            {
                "rows": rows,
                "before_us": round(statistics.median(before), 1),
                "with_us": round(statistics.median(after), 1),
                "more_percent": round(100 * statistics.median(more), 2),
                "least_percent": round(100 * min(more), 2),
                "most_percent": round(100 * max(more), 2),
            }
        )
    figures = {"other": args.other_commit, "rounds": args.rounds, "rows": table}
    tables = [record.table(tuple(table[0]), [tuple(each.values()) for each in table])]
    record.write("confidence", "What certainties cost a decode step", figures, tables)
