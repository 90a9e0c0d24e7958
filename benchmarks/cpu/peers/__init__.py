"""Legato, transformers and llama.cpp on the same CPU cores, in turns, with the same weights.

SmolLM2-135M-Instruct from the file of `make tools` (GGUF, Q4_1). Each contender is a process that
is bound to the same cores and stopped while others work; every round asks all of them for the same:
a prompt that is new to them, then decoding of 1 and of 4 streams. Rounds follow each other until
the time is over. What is compared has its turns one right after the other, in changing order, and
the comparison is the median of the rounds' ratios. Seconds of CPU stand beside, as they depend less
on a machine's other work; with `--cores 1` no thread waits for another. llama.cpp takes part where
the Python of `--llama-python` has the package llama-cpp-python.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from legato_engine.models.decoder.gguf import gguf_tokenizer
from legato_engine.models.gguf import read_gguf

from benchmarks import record
from benchmarks.record import ROOT

FILE = ROOT / ".tools" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
_TEXT = ROOT / "docs" / "architecture.md"
_HERE = Path(__file__).parent
_MARK = "\x1e"  # begins a contender's lines among what its libraries print


@dataclasses.dataclass(frozen=True, slots=True)
class Entrant:
    """A contender's name in tables, its module, and that module's arguments."""

    name: str
    module: str
    arguments: tuple[str, str]


ENTRANTS = (
    Entrant("Legato, f32", "legato", ("f32", "model")),
    Entrant("transformers, f32", "transformers_peer", ("float32", "-")),
    Entrant("Legato, bf16", "legato", ("bf16", "model")),
    Entrant("transformers, bf16", "transformers_peer", ("bfloat16", "-")),
    Entrant("Legato, int8", "legato", ("f32", "int8")),
    Entrant("llama.cpp, Q8_0", "llama_cpp_peer", ("Q8_0", "-")),
    Entrant("Legato, int4", "legato", ("f32", "int4")),
    Entrant("llama.cpp, Q4_1, as in the file", "llama_cpp_peer", ("file", "-")),
)
PAIRS = tuple(
    (ours.name, theirs.name) for ours, theirs in zip(ENTRANTS[::2], ENTRANTS[1::2], strict=True)
)
TASKS = ("1 stream", "4 streams", "prefill")

Rate = dict[str, float]
"""One turn: tokens `per_second`, `cpu_ms` of a token, and the `token` after a prompt."""

Round = dict[str, dict[str, Rate]]
"""Of contenders, by task."""


class Process:
    """A contender's process, which is stopped unless it loads its model or has its turn."""

    def __init__(self, entrant: Entrant, command: Sequence[str], cores: set[int]) -> None:
        """Start it and wait until it has loaded its model.

        Raises:
            RuntimeError: It ended.
        """
        self.entrant = entrant
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            ["taskset", "--cpu-list", ",".join(map(str, cores)), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(len(cores))},
        )
        self.versions: dict[str, str] = self._answer()["versions"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **what: Any) -> dict[str, Any]:
        """Let it take its turn."""
        assert self._process.stdin is not None, "it was asked for"
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "it was asked for"
        for line in self._process.stdout:
            if line.startswith(_MARK):
                self._process.send_signal(signal.SIGSTOP)
                answer: dict[str, Any] = json.loads(line[1:])
                return answer
        self._process.wait()
        self._errors.seek(0)
        said = [line.strip() for line in self._errors if line.strip()]
        raise RuntimeError(said[-1][:200] if said else f"exit code {self._process.returncode}")


def main(argv: Sequence[str]) -> int:
    """Run all contenders that are there and record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks cpu_peers", description=__doc__)
    parser.add_argument("--name", default="cpu_peers", help="of the record")
    parser.add_argument("--weights", type=Path, default=FILE, help="a GGUF file")
    parser.add_argument("--cores", type=int, default=2, help="cores for each contender")
    parser.add_argument("--seconds", type=float, default=200, help="for rounds, after the start")
    parser.add_argument("--rounds", type=int, default=3, help="at least, after one to warm up")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt to prefill")
    parser.add_argument("--steps", type=int, default=16, help="timed tokens of a stream")
    parser.add_argument("--llama-python", default=sys.executable, help="one with llama-cpp-python")
    parser.add_argument("--only", default="", help="contenders whose names contain this")
    options = parser.parse_args(argv)
    cores = set(sorted(os.sched_getaffinity(0))[: options.cores])
    load = os.getloadavg()[0]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # stopped processes outlive a pipe's end
    with contextlib.ExitStack() as stack:
        running, absent = _started(options, cores, stack)
        rounds = _rounds(running, options)
    figures = _figures(running, rounds, absent, options)
    figures["load_before"] = load
    title = f"SmolLM2-135M-Instruct on {len(cores)} CPU cores: Legato, transformers, llama.cpp"
    record.write(options.name, title, figures, _tables(figures))
    return 0


def _started(
    options: argparse.Namespace, cores: set[int], stack: contextlib.ExitStack
) -> tuple[list[Process], dict[str, str]]:
    """Start the chosen contenders, as many at a time as there are cores; say why others are not."""
    chosen = [entrant for entrant in ENTRANTS if options.only in entrant.name]
    running, absent = [], {}

    def start(entrant: Entrant) -> Process | str:
        try:
            process = Process(entrant, _command(entrant, options, len(cores)), cores)
        except RuntimeError as error:
            return str(error)
        stack.callback(process.end)
        print(f"{entrant.name}: ready", flush=True)
        return process

    with ThreadPoolExecutor(len(cores)) as starters:
        for entrant, started in zip(chosen, starters.map(start, chosen), strict=True):
            if isinstance(started, Process):
                running.append(started)
            else:
                absent[entrant.name] = started
    return running, absent


def _command(entrant: Entrant, options: argparse.Namespace, cores: int) -> list[str]:
    arguments = [str(options.weights.resolve()), *entrant.arguments, str(cores)]
    if entrant.module == "llama_cpp_peer":
        return [options.llama_python, str(_HERE / "llama_cpp_peer.py"), *arguments]
    return [sys.executable, "-m", f"benchmarks.cpu.peers.{entrant.module}", *arguments]


def _rounds(running: Sequence[Process], options: argparse.Namespace) -> list[Round]:
    """Take turns until the time is over; the first round warms up and does not count."""
    end = time.monotonic() + options.seconds
    rounds: list[Round] = []
    for index, prompts in enumerate(_prompts(options)):
        if index > options.rounds and time.monotonic() > end:
            break
        rounds.append(_round(_order(running, index), prompts, options.steps))
        print(f"round {index}: done", flush=True)
    return rounds[1:]


def _order(running: Sequence[Process], index: int) -> list[Process]:
    """Let the second of each pair begin in every other round."""
    if index % 2 == 0:
        return list(running)
    swapped = {name: number ^ 1 for number, name in enumerate(itertools.chain(*PAIRS))}
    return sorted(running, key=lambda process: swapped[process.entrant.name])


def _prompts(options: argparse.Namespace) -> Iterator[dict[str, list[list[int]]]]:
    """Make each round's prompts, without end. None begins as another does."""
    words = gguf_tokenizer(read_gguf(options.weights))
    ids = words.encode(_TEXT.read_text()).ids
    for index in itertools.count():
        first = 1000 + index * 37  # another token first, so that no cached prefix helps
        at = index * 97 % (len(ids) - max(options.prompt, 128))
        short = [[first + 1 + n, *ids[at + n * 16 : at + n * 16 + 31]] for n in range(5)]
        yield {
            "prefill": [[first, *ids[at : at + options.prompt - 1]]],
            "1 stream": short[:1],
            "4 streams": short[1:],
        }


def _round(running: Sequence[Process], prompts: dict[str, list[list[int]]], steps: int) -> Round:
    """Let every contender do each of the round's tasks."""
    found: Round = {}
    for task, asked in prompts.items():
        tokens = len(asked[0]) if task == "prefill" else steps * len(asked)
        for process in running:
            kind = "prefill" if task == "prefill" else "decode"
            answer = process.ask(kind=kind, prompts=asked, steps=steps)
            rate = {
                "per_second": tokens / answer["seconds"],
                "cpu_ms": 1e3 * answer["cpu_seconds"] / tokens,
            }
            if "token" in answer:
                rate["token"] = answer["token"]
            found.setdefault(process.entrant.name, {})[task] = rate
    return found


def _figures(
    running: Sequence[Process],
    rounds: Sequence[Round],
    absent: dict[str, str],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Take medians over rounds, of rates and of ratios; the spread is that of all rounds."""
    contenders = {}
    for name in (process.entrant.name for process in running):
        tasks = {
            task: _spread(each[name][task]["per_second"] for each in rounds)
            | {"cpu_ms": statistics.median(each[name][task]["cpu_ms"] for each in rounds)}
            for task in rounds[0][name]
        }
        firsts = [each[name]["prefill"]["token"] for each in rounds]
        contenders[name] = {"tasks": tasks, "first_tokens": firsts}
    ratios = {
        f"{ours} / {theirs}": {task: _ratios(rounds, task, ours, theirs) for task in TASKS}
        for ours, theirs in PAIRS
        if {ours, theirs} <= contenders.keys()
    }
    return {
        "prompt": options.prompt,
        "steps": options.steps,
        "rounds": len(rounds),
        "weights": options.weights.name,
        "versions": {name: text for each in running for name, text in each.versions.items()},
        "contenders": contenders,
        "ratios": ratios,
        "absent": absent,
    }


def _spread(values: Iterable[float]) -> dict[str, float]:
    seen = list(values)
    return {"median": statistics.median(seen), "least": min(seen), "most": max(seen)}


def _ratios(rounds: Sequence[Round], task: str, ours: str, theirs: str) -> dict[str, Any]:
    """Compare speeds round by round: above 1 ours is faster, or takes less CPU."""
    speed = _spread(
        each[ours][task]["per_second"] / each[theirs][task]["per_second"] for each in rounds
    )
    cpu = statistics.median(
        each[theirs][task]["cpu_ms"] / each[ours][task]["cpu_ms"] for each in rounds
    )
    return {**speed, "by_cpu": cpu}


def _tables(figures: dict[str, Any]) -> list[str]:
    rates = [
        [name, *(_rate(contender["tasks"][task]) for task in TASKS)]
        for name, contender in figures["contenders"].items()
    ]
    rates += [[name, "absent", reason, ""] for name, reason in figures["absent"].items()]
    ratios = [
        [pair, *(_ratio(compared[task]) for task in TASKS)]
        for pair, compared in figures["ratios"].items()
    ]
    text = (
        f"Medians of {figures['rounds']} rounds (least-most); prefill of {figures['prompt']} "
        f"tokens, {figures['steps']} tokens of a stream after 32 of a prompt; in brackets "
        "milliseconds of CPU for a token."
    )
    return [
        text,
        "",
        record.table(("tokens/s", *TASKS), rates),
        "",
        "Ratios of speed, medians of the rounds' (least-most); in brackets the ratio by CPU.",
        "",
        record.table(("speed, theirs = 1", *TASKS), ratios),
    ]


def _rate(rate: dict[str, float]) -> str:
    spread = f"({rate['least']:.1f}-{rate['most']:.1f})"
    return f"{rate['median']:.1f} {spread} [{rate['cpu_ms']:.1f}]"


def _ratio(ratio: dict[str, float]) -> str:
    spread = f"({ratio['least']:.2f}-{ratio['most']:.2f})"
    return f"{ratio['median']:.2f} {spread} [{ratio['by_cpu']:.2f}]"
