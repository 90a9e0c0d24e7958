"""A server's start on this machine, and what it holds in memory when it is idle.

Each case is `legato serve` as a process of its own, in turns. Its log's events tell the stages: the
service looks at its engine ten times a second, so a stage that is shorter may have no event.
Memory is read a moment after the server is ready: of the engine process, and of all processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record

STAGES = ("start", "device", "weights", "warm-up", "ready")
"""As logged: service and imports; the model's description; its weights; the warm-up."""

_SETTLED = 2.0  # seconds after which an idle server is looked at
_MIB = 1024  # KiB


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """Seconds until each stage began, processor seconds until ready, and MiB when idle."""

    stages: Mapping[str, float]
    cpu: float
    engine: Mapping[str, int]
    everything: Mapping[str, int]


def main(argv: Sequence[str]) -> int:
    """Measure all cases and write a record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks start", description=__doc__)
    parser.add_argument("--weights", type=Path, help="a text model's file, served besides")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--name", default="start")
    arguments = parser.parse_args(argv)
    cases = cases_of(arguments.weights)
    starts: dict[str, list[Start]] = {name: [] for name in cases}
    for _ in range(arguments.turns):
        for name, options in cases.items():
            starts[name].append(start(options))
    library = imported("torch")
    figures = {
        "import_torch_mib": library,
        "cases": {
            name: [dataclasses.asdict(each) for each in all_] for name, all_ in starts.items()
        },
    }
    alone = f"Importing torch alone: {library['Rss']} MiB RSS, {library['Uss']} of its own."
    record.write(
        arguments.name,
        "Start of a server, and its idle memory",
        figures,
        [table(starts), "", alone],
    )
    return 0


def cases_of(weights: Path | None) -> dict[str, tuple[str, ...]]:
    """Options of `legato serve` by what they serve."""
    models: dict[str, tuple[str, ...]] = {"legato-tiny": ()}
    if weights is not None:
        of = ("--weights", str(weights))
        models |= {weights.name: of, f"{weights.name}, int8": (*of, "--weight-dtype", "int8")}
    budget = ("--speculation", "budget")
    return {
        name + note: options + more
        for name, options in models.items()
        for note, more in (("", ()), (", budget", budget))
    }


def start(options: Sequence[str]) -> Start:
    """Start a server, look at it, and stop it."""
    program = [sys.executable, "-m", "legato_client.cli", "serve", "--listen", "127.0.0.1:0"]
    began = time.time()
    with subprocess.Popen([*program, *options], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        stages: dict[str, float] = {}
        for line in server.stderr:
            event = json.loads(line)
            stage = event["event"] if event["event"] == "ready" else event.get("stage", "")
            if stage in STAGES:
                told = datetime.datetime.fromisoformat(event["timestamp"]).timestamp()
                stages.setdefault(stage, told - began)
            if stage == "ready":
                break
        pids = descendants(server.pid)
        cpu = sum(map(cpu_seconds, pids))
        time.sleep(_SETTLED)
        held = {pid: memory_mib(pid) for pid in pids}
        server.terminate()
        server.stderr.read()
    if "ready" not in stages:
        raise SystemExit(f"legato serve {' '.join(options)} did not get ready")
    stages = with_unseen(stages)
    engine = max(held.values(), key=lambda each: each["Rss"])
    everything = {kind: sum(each[kind] for each in held.values()) for kind in engine}
    return Start(stages, cpu, engine, everything)


def with_unseen(stages: Mapping[str, float]) -> dict[str, float]:
    """All stages; one without an event took no time before the next."""
    all_: dict[str, float] = {}
    following = stages["ready"]
    for stage in reversed(STAGES):
        all_[stage] = following = stages.get(stage, following)
    return all_


def table(starts: Mapping[str, Sequence[Start]]) -> str:
    """Medians of each case's turns; PSS counts shared memory once for all processes."""
    heads = ("served", *(f"{stage}, s" for stage in STAGES), "CPU, s")
    memory = ("engine RSS, MiB", "of its own (USS)", "all processes, PSS")
    rows = [
        (
            name,
            *(f"{statistics.median(each.stages[stage] for each in turns):.1f}" for stage in STAGES),
            f"{statistics.median(each.cpu for each in turns):.1f}",
            statistics.median_low([each.engine["Rss"] for each in turns]),
            statistics.median_low([each.engine["Uss"] for each in turns]),
            statistics.median_low([each.everything["Pss"] for each in turns]),
        )
        for name, turns in starts.items()
    ]
    return record.table((*heads, *memory), rows)


def imported(library: str) -> dict[str, int]:
    """Memory of a process that has imported it."""
    program = f"import {library}, sys; print('done', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        return memory_mib(process.pid)


def memory_mib(pid: int) -> dict[str, int]:
    """RSS, PSS and USS."""
    kib: dict[str, Any] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        kind, _, size = line.partition(":")
        kib[kind] = int(size.split()[0])
    own = kib["Private_Clean"] + kib["Private_Dirty"]
    return {"Rss": kib["Rss"] // _MIB, "Pss": kib["Pss"] // _MIB, "Uss": own // _MIB}


def cpu_seconds(pid: int) -> float:
    """Of the process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """Return the process and its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in descendants(int(child)))]
