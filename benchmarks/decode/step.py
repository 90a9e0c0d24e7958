"""The decode step and the gain of pipelining: a record of `legato_engine.bench`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import record


def main(argv: Sequence[str]) -> int:
    """Run the engine's bench in a process of its own and record its figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks decode", description=__doc__)
    parser.add_argument("--name", default="decode", help="of the record")
    arguments, options = parser.parse_known_args(argv)
    command = [sys.executable, "-m", "legato_engine.bench.command", "--json", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        return done.returncode
    figures = json.loads(done.stdout)
    model = figures["model"]
    title = f"Decode step: {model['name']} ({model['dtype']}) on {model['device']}"
    tables = [_steps(figures["rows"]), "", _gains(figures)]
    if figures.get("detect_over_text"):
        tables += ["", _constrained(figures["detect_over_text"])]
    record.write(arguments.name, title, figures, tables)
    return 0


def _steps(rows: Sequence[Mapping[str, Any]]) -> str:
    parts = ("forward ms", "sampling ms", "period ms", "device idle ms", "CPU tick ms")
    keys = ("forward", "sampling", "period", "idle", "tick")
    return record.table(
        ("task", "streams", "context", *parts),
        [
            [*_head(row), row["context"], *(f"{row['pipelined'][key]:.3f}" for key in keys)]
            for row in rows
        ],
    )


def _gains(figures: Mapping[str, Any]) -> str:
    heads = ("blocking ms", "pipelined ms", "L", "predicted", "observed", "tokens/s")
    return record.table(
        ("task", "streams", *heads),
        [
            [
                *_head(row),
                f"{row['blocking']['period']:.3f}",
                f"{row['pipelined']['period']:.3f}",
                row["length"],
                f"{row['predicted'] - 1:+.1%}",
                f"{row['observed'] - 1:+.1%}",
                f"{row['tokens_per_second']['2']:.0f}",
            ]
            for row in figures["rows"]
        ],
    )


def _constrained(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the steps of constrained tasks beside those of free text."""
    keys = [key for key in rows[0] if key != "context"]
    keys.insert(1, "context")
    heads = [key.replace("_", " ") for key in keys]
    return record.table(
        heads,
        [[*(row[key] for key in keys[:2]), *(f"{row[k]:.3f}" for k in keys[2:])] for row in rows],
    )


def _head(row: Mapping[str, Any]) -> tuple[str, int]:
    return row["task"], row["streams"]
