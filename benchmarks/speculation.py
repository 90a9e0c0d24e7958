"""What speculation buys: `legato_engine.bench --speculation`, recorded."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence

from benchmarks import record


def main(argv: Sequence[str]) -> int:
    """Run the engine's bench in a process of its own and record its figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks speculation", description=__doc__)
    parser.add_argument("--name", default="speculation", help="of the record")
    arguments, options = parser.parse_known_args(argv)
    bench = [sys.executable, "-m", "legato_engine.bench", "--speculation", "--json"]
    done = subprocess.run([*bench, *options], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        return done.returncode
    figures = json.loads(done.stdout)
    model = figures["model"]
    title = f"Speculation: {model['name']} ({model['dtype']}) on {model['device']}"
    record.write(arguments.name, title, figures, [*_note(model["device"]), _table(figures["rows"])])
    return 0


def _note(device: str) -> list[str]:
    if not device.startswith("cpu"):
        return []
    return [
        "Counts are exact. Times show only that it runs: on a CPU a token more costs what a row "
        "does, and the machine had other work.",
        "",
    ]


def _table(rows: Sequence[dict]) -> str:
    plain = {
        (row["workload"], row["streams"]): row["tokens_per_second"]
        for row in rows
        if row["setting"] == "off"
    }
    heads = ("tokens/s", "gain", "tokens per verify", "accepted", "mean block", "variance")
    gaps = ("p50", "p95", "p99")
    return record.table(
        ("workload", "streams", "setting", *heads, *(f"gap {gap} ms" for gap in gaps), "identical"),
        [
            [
                *(row["workload"], row["streams"], row["setting"]),
                f"{row['tokens_per_second']:.0f}",
                f"{row['tokens_per_second'] / plain[row['workload'], row['streams']]:.2f}",
                f"{row['tokens_per_verify']:.2f}",
                f"{row['acceptance']:.0%}",
                f"{row['mean_block_size']:.2f}",
                f"{row['block_size_variance']:.2f}",
                *(f"{row['gap_ms'][gap]:.2f}" for gap in gaps),
                "yes" if row["identical"] else "NO",
            ]
            for row in rows
        ],
    )
