"""Records of benchmarks: a JSON file for each run, with the facts to repeat it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import provenance

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Describe the machine, the software and the commit.

    Raises:
        DirtyTreeError: The tree is not that of a commit; see `provenance`.
    """
    import torch

    facts: dict[str, Any] = {
        "command": "python -m benchmarks " + " ".join(sys.argv[1:]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": provenance.recordable(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
    }
    if torch.cuda.is_available():
        used = f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}"  # a host may have several
        query = "--query-gpu=name,driver_version,clocks.sm,clocks.mem"
        facts["gpu"] = _output("nvidia-smi", used, query, "--format=csv,noheader")
    return facts


def write(name: str, title: str, figures: Mapping[str, Any], tables: Sequence[str]) -> Path:
    """Write `results/<name>.json`, and return its path.

    `LEGATO_RESULTS` names another folder than `results`. The tables are printed first, so that a
    refused record loses no figures.

    Raises:
        DirtyTreeError: The tree is not that of a commit; see `provenance`.
    """
    print("\n".join(tables))
    folder = Path(os.environ.get("LEGATO_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    facts = environment()
    lines = "\n".join(tables).splitlines()
    document = {"title": title, "surroundings": facts, "tables": lines, "figures": figures}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written: {path.name}")
    return path


def quantiles(values: Sequence[float], n: int) -> list[float]:
    """Return the n - 1 cuts of values; of a single value, all are that value."""
    return statistics.quantiles(values, n=n) if len(values) > 1 else list(values) * (n - 1)


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
