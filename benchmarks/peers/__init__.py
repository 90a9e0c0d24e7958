"""Peers on the same device in the same run: one decode step of Moondream 2's decoder.

Each peer runs in a process of its own with a time limit, so that a failure does not stop the
others. Weights are random, bf16; a step is forward and greedy sampling.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

from benchmarks import record, shared_options
from benchmarks.peers.child import add_options


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """A peer's module in this folder, its name in tables, and its limit in seconds."""

    module: str
    name: str
    seconds: float


PEERS = {
    "torch": Peer("plain_torch", "torch operations, one CUDA graph", 60),
    "moondream": Peer("moondream_reference", "Moondream's reference implementation", 120),
    "transformers": Peer("transformers_phi", "transformers, static cache, torch.compile", 200),
    "vllm": Peer("vllm_phi", "vLLM", 240),
}

# Measured earlier, on another NVIDIA H200; no record was kept.
EARLIER: dict[str, list[dict[str, Any]]] = {
    "vllm": [
        {"streams": streams, "step_ms": step, "version": "0.24.0", "context": "850 to 1122"}
        for streams, step in ((1, 1.65), (8, 2.03), (32, 3.48))
    ],
    "moondream": [
        {"streams": 1, "step_ms": 12.57, "total_ms": 134, "compiled": False},
        {"streams": 1, "step_ms": 4.63, "total_ms": 109, "compiled": True},
    ],
}


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a peer: `status` is ok, absent, failed or timeout, with a `reason`.

    `rows` are of this run, also those before a failure. Without any, `not_of_this_run` quotes
    earlier ones.
    """

    peer: str
    name: str
    status: str
    reason: str
    seconds: float
    versions: dict[str, str]
    rows: list[dict[str, Any]]
    not_of_this_run: list[dict[str, Any]]


def absence(key: str, reference: str) -> str:
    """Return why a peer cannot run here; empty when it can."""
    if key == "moondream" and not reference:
        return "no folder given with --moondream-reference"
    package = {"vllm": "vllm", "transformers": "transformers"}.get(key)
    if package and importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return ""


def run(key: str, peer: Peer, options: Sequence[str], reference: str, seconds: float) -> Outcome:
    """Run one peer in its process and collect its output."""
    reason = absence(key, reference)
    if reason:
        return _outcome(key, peer, "absent", reason, 0.0, [])
    command = [sys.executable, "-m", f"benchmarks.peers.{peer.module}", *options]
    if key == "moondream":
        command += ["--path", reference]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        try:
            done = subprocess.run(command, stdout=out, stderr=errors, timeout=seconds, check=False)
            status = "ok" if done.returncode == 0 else "failed"
            reason = "" if done.returncode == 0 else _last_line(errors) or str(done.returncode)
        except subprocess.TimeoutExpired:
            status, reason = "timeout", f"not done after {seconds:.0f} s; {_last_line(errors)}"
        lines = list(_json_lines(out))
    return _outcome(key, peer, status, reason, time.monotonic() - start, lines)


def _outcome(
    key: str, peer: Peer, status: str, reason: str, seconds: float, lines: list[dict[str, Any]]
) -> Outcome:
    rows = [line for line in lines if "streams" in line]
    versions = {name: text for line in lines for name, text in line.get("versions", {}).items()}
    earlier = [] if rows else EARLIER.get(key, [])
    return Outcome(key, peer.name, status, reason, seconds, versions, rows, earlier)


def _json_lines(file: IO[str]) -> Iterator[dict[str, Any]]:
    file.seek(0)
    for line in file:
        if line.startswith("{"):
            yield json.loads(line)


def _last_line(file: IO[str]) -> str:
    file.seek(0)
    lines = [line.strip() for line in file if line.strip()]
    return lines[-1][:300] if lines else ""


def main(argv: Sequence[str]) -> int:
    """Run the peers and record; 1 when an installed one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__)
    add_options(parser)
    parser.add_argument("--name", default="peers", help="of the record")
    parser.add_argument(
        "--peers", type=shared_options.names_of(PEERS), default=list(PEERS), help="e.g. torch,vllm"
    )
    parser.add_argument("--moondream-reference", default="", help="folder of its checkout")
    parser.add_argument("--budget", type=float, default=700, help="seconds for all together")
    arguments = parser.parse_args(argv)
    options = [
        *("--streams", ",".join(map(str, arguments.streams))),
        *("--context", str(arguments.context)),
        *("--steps", str(arguments.steps)),
        *("--device", arguments.device),
        *(["--dry"] if arguments.dry else []),
        *(["--eager"] if arguments.eager else []),
    ]
    outcomes = []
    end = time.monotonic() + arguments.budget
    for key in arguments.peers:
        peer = PEERS[key]
        seconds = max(1.0, min(peer.seconds, end - time.monotonic()))
        outcomes.append(run(key, peer, options, arguments.moondream_reference, seconds))
        print(f"{peer.name}: {outcomes[-1].status} {outcomes[-1].reason}", flush=True)
    figures = {
        "context": arguments.context,
        "dry": arguments.dry,
        "peers": [dataclasses.asdict(outcome) for outcome in outcomes],
    }
    sizes = f"Moondream 2's decoder, bf16, {arguments.context} tokens of context"
    title = f"Peers: decode step, {'tiny sizes to try the code' if arguments.dry else sizes}"
    record.write(arguments.name, title, figures, [table(outcomes, arguments.streams)])
    return 1 if any(outcome.status in ("failed", "timeout") for outcome in outcomes) else 0


def table(outcomes: Sequence[Outcome], streams: Sequence[int]) -> str:
    """Format the steps in ms side by side, and other figures of a peer after them."""
    lines: list[list[str]] = []
    for outcome in outcomes:
        rows, note = outcome.rows, f"{outcome.status} {outcome.reason}".strip()
        if not rows and outcome.not_of_this_run:
            rows, note = outcome.not_of_this_run, f"{note}; figures not of this run"
        for compiled in sorted({row.get("compiled") for row in rows}, key=str) or [None]:
            chosen = {r["streams"]: r for r in rows if r.get("compiled") == compiled}
            kind = {"True": ", compiled", "False": ", eager"}.get(str(compiled), "")
            steps = [f"{chosen[n]['step_ms']:.3f}" if n in chosen else "-" for n in streams]
            total = next((r["total_ms"] for r in chosen.values() if "total_ms" in r), None)
            whole = "-" if total is None else f"{total:.1f}"
            lines.append([outcome.name + kind, *steps, whole, note])
    heads = ("peer", *(f"{n} streams, ms" for n in streams), "850x600 JPEG to 3 tokens, ms", "")
    return record.table(heads, lines)
