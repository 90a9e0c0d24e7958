"""Peers on the same device in the same run: one decode step of Moondream 2's decoder.

Each peer runs in a process of its own with a time limit, so that a failure does not stop the
others. Weights are random, bf16; a step is forward and greedy sampling.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import torch

from benchmarks import record, shared_options


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


# ---------------------------------------------------------------- child
# Code that every peer's process shares: options, the decoder's shape, timing, output.


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with parallel blocks of attention and MLP, as in Phi and Moondream 2."""

    dim: int = 2048
    layers: int = 24
    heads: int = 32
    ff_dim: int = 8192
    vocab: int = 51200
    max_context: int = 2048
    rotary_dim: int = 32

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.heads


MOONDREAM2 = Shape()
DRY = Shape(dim=128, layers=2, heads=2, ff_dim=256, vocab=512)  # the same head, so the same RoPE


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What to measure: `steps` timed ones per number of streams, the first at `context`."""

    streams: tuple[int, ...]
    context: int
    steps: int
    warm_up: int
    device: str
    dry: bool
    path: str
    compiled: bool

    @property
    def shape(self) -> Shape:
        """The decoder to build."""
        return DRY if self.dry else MOONDREAM2

    @property
    def capacity(self) -> int:
        """Positions that a cache needs, rounded up to 64."""
        return -(-(self.context + self.warm_up + self.steps + 1) // 64) * 64


class StepTimer:
    """Times between marks: by events of the current stream on a GPU, by the clock on a CPU."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Mark the end of one step and the beginning of the next."""
        if self._device.type == "cpu":
            self._marks.append(time.perf_counter())
            return
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        self._marks.append(event)

    def laps(self) -> list[float]:
        """Return milliseconds between consecutive marks, once all have passed."""
        pairs = itertools.pairwise(self._marks)
        if self._device.type == "cpu":
            return [(end - start) * 1e3 for start, end in pairs]
        torch.accelerator.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]


def step_times(step: Callable[[], object], options: Options) -> list[float]:
    """Return milliseconds of `options.steps` consecutive steps, after the warm-up."""
    for _ in range(options.warm_up):
        step()
    synchronize(options.device)
    timer = StepTimer(options.device)
    timer.mark()
    for _ in range(options.steps):
        step()
        timer.mark()
    return timer.laps()


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize()


def emit(row: Mapping[str, Any]) -> None:
    """Print one line of JSON for the parent; it survives a later failure."""
    print(json.dumps(row), flush=True)


def parse(argv: Sequence[str] | None = None) -> Options:
    """Parse the options of a peer's process."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    parser.add_argument("--path", default="", help="of the peer's code, where it has no package")
    arguments = parser.parse_args(argv)
    return Options(
        streams=tuple(arguments.streams),
        context=min(arguments.context, 64) if arguments.dry else arguments.context,
        steps=min(arguments.steps, 4) if arguments.dry else arguments.steps,
        warm_up=2 if arguments.dry else 8,
        device=arguments.device,
        dry=arguments.dry,
        path=arguments.path,
        compiled=not arguments.eager,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that the parent passes on."""
    parser.add_argument(
        "--streams", type=shared_options.numbers, default=[1, 8, 32], help="e.g. 1,8,32"
    )
    parser.add_argument("--context", type=int, default=850, help="positions before the first step")
    parser.add_argument("--steps", type=int, default=60, help="timed steps")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dry", action="store_true", help="tiny sizes: does the code run?")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")


def versions(*modules: str) -> dict[str, str]:
    """Return the versions of imported modules."""
    names = ("torch", *modules)
    return {name: str(getattr(sys.modules[name], "__version__", "")) for name in names}
