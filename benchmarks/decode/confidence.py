"""What certainties cost a decode step: this tree beside another, in turns on one GPU.

    python -m benchmarks confidence --other FOLDER --other-commit HASH

`other` is a checkout from before them. Each round measures both trees, in changing order: the
steps of an object of Detect, by captured graphs.
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

ROOT = Path(__file__).parents[2]
CHILD = Path(__file__).with_name("step_values.py")
ROWS = (1, 8, 32)
TOKENS = ("x", "y", "size")
PACKAGES = ("proto/gen", "engine", "engine/tiny", "service", "clients/python")


class Tree:
    """A child that runs one tree's engine."""

    def __init__(self, root: Path, model: Sequence[str]) -> None:
        paths = [*(str(root / each) for each in PACKAGES), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(CHILD), *model],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_until_ready(self) -> None:
        self._line()

    def microseconds(self, rows: int, token: str) -> float:
        assert self._process.stdin is not None, "its input is a pipe"
        print(rows, token, file=self._process.stdin, flush=True)
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
    parser.add_argument("--model", default="moondream2")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(arguments)
    model = (args.model, args.device)
    trees = {"before": Tree(args.other, model), "with certainties": Tree(ROOT, model)}
    for tree in trees.values():
        tree.wait_until_ready()
    kinds = [(rows, token) for rows in ROWS for token in TOKENS]
    taken: dict[tuple[str, int, str], list[float]] = {
        (n, *kind): [] for n in trees for kind in kinds
    }
    for turn in range(args.rounds + 1):
        for name in list(trees)[:: 1 if turn % 2 else -1]:
            for kind in kinds:
                step = trees[name].microseconds(*kind)
                if turn:  # the first one captures graphs
                    taken[name, *kind].append(step)
    for tree in trees.values():
        tree.close()
    table = []
    for rows in ROWS:
        for token in (*TOKENS, "object"):
            steps = TOKENS if token == "object" else (token,)
            before, after = (
                [sum(each) for each in zip(*(taken[name, rows, of] for of in steps), strict=True)]
                for name in trees
            )
            table.append({"rows": rows, "token": token} | _compared(before, after))
    figures = {
        "model": args.model,
        "other": args.other_commit,
        "rounds": args.rounds,
        "rows": table,
    }
    tables = [record.table(tuple(table[0]), [tuple(each.values()) for each in table])]
    record.write("confidence", "What certainties cost a decode step", figures, tables)


def _compared(before: Sequence[float], after: Sequence[float]) -> dict[str, float]:
    """Medians; what certainties add is compared within each round."""
    more = sorted(b / a - 1 for a, b in zip(before, after, strict=True))
    quartile = len(more) // 4
    return {
        "before_us": round(statistics.median(before), 1),
        "with_us": round(statistics.median(after), 1),
        "more_percent": round(100 * statistics.median(more), 2),
        "quarter_below_percent": round(100 * more[quartile], 2),
        "quarter_above_percent": round(100 * more[-1 - quartile], 2),
    }
