"""Legato, transformers and llama.cpp on the same CPU cores, in turns, with the same weights.

SmolLM2-135M-Instruct from the file of `make tools` (GGUF, Q4_1). Each contender is a process that
is bound to the same cores and waits while others work; every round asks all of them for the same:
a prompt that is new to them, then decoding of 1 and of 4 streams. llama.cpp takes part where the
Python of `--llama-python` has the package llama-cpp-python.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from legato_engine.models.gguf.reader import read_gguf
from legato_engine.models.gguf.tokenizer import tokenizer_json
from tokenizers import Tokenizer

from benchmarks import record
from benchmarks.provenance import ROOT

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
    Entrant("Legato, bf16", "legato", ("bf16", "model")),
    Entrant("Legato, int8", "legato", ("f32", "int8")),
    Entrant("Legato, int4", "legato", ("f32", "int4")),
    Entrant("transformers, f32", "transformers_peer", ("float32", "-")),
    Entrant("transformers, bf16", "transformers_peer", ("bfloat16", "-")),
    Entrant("llama.cpp, Q8_0", "llama_cpp_peer", ("Q8_0", "-")),
    Entrant("llama.cpp, Q4_1, as in the file", "llama_cpp_peer", ("file", "-")),
)


class Process:
    """A contender's process, which has loaded its model."""

    def __init__(self, entrant: Entrant, command: Sequence[str], cores: set[int]) -> None:
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

    def ask(self, **what: Any) -> dict[str, Any]:
        """Let it take its turn."""
        assert self._process.stdin is not None, "it was asked for"
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
                answer: dict[str, Any] = json.loads(line[1:])
                return answer
        self._process.wait()
        self._errors.seek(0)
        said = [line.strip() for line in self._errors if line.strip()]
        raise RuntimeError(said[-1][:200] if said else f"exit code {self._process.returncode}")


def main(argv: Sequence[str]) -> int:
    """Run all contenders that are there and record; 1 when one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks cpu_peers", description=__doc__)
    parser.add_argument("--name", default="cpu_peers", help="of the record")
    parser.add_argument("--weights", type=Path, default=FILE, help="a GGUF file")
    parser.add_argument("--cores", type=int, default=2, help="cores for each contender")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt to prefill")
    parser.add_argument("--steps", type=int, default=48, help="timed tokens of a stream")
    parser.add_argument("--llama-python", default=sys.executable, help="one with llama-cpp-python")
    parser.add_argument("--only", default="", help="contenders whose names contain this")
    options = parser.parse_args(argv)
    cores = set(sorted(os.sched_getaffinity(0))[: options.cores])
    chosen = [entrant for entrant in ENTRANTS if options.only in entrant.name]
    with contextlib.ExitStack() as stack:
        running, absent = [], {}
        for entrant in chosen:
            command = _command(entrant, options, len(cores))
            try:
                process = Process(entrant, command, cores)
            except RuntimeError as error:
                absent[entrant.name] = str(error)
                continue
            stack.callback(process.end)
            running.append(process)
            print(f"{entrant.name}: ready", flush=True)
        rounds = [_round(running, made, options.steps) for made in _prompts(options)]
    figures = _figures(running, rounds[1:] or rounds, absent, options)
    title = f"SmolLM2-135M-Instruct on {len(cores)} CPU cores: Legato, transformers, llama.cpp"
    record.write(options.name, title, figures, _tables(figures))
    return 0


def _command(entrant: Entrant, options: argparse.Namespace, cores: int) -> list[str]:
    arguments = [str(options.weights.resolve()), *entrant.arguments, str(cores)]
    if entrant.module == "llama_cpp_peer":
        return [options.llama_python, str(_HERE / "llama_cpp_peer.py"), *arguments]
    return [sys.executable, "-m", f"benchmarks.cpu_peers.{entrant.module}", *arguments]


def _prompts(options: argparse.Namespace) -> Iterator[dict[str, list[list[int]]]]:
    """Make each round's prompts; the first round warms up. None begins as another does."""
    words = Tokenizer.from_str(json.dumps(tokenizer_json(read_gguf(options.weights))))
    ids = words.encode(_TEXT.read_text()).ids
    for index in range(options.rounds + 1):
        first = 1000 + index * 37  # another token first, so that no cached prefix helps
        at = index * 97 % (len(ids) - options.prompt)
        short = [[first + 1 + n, *ids[at + n * 16 : at + n * 16 + 31]] for n in range(5)]
        yield {
            "prefill": [[first, *ids[at : at + options.prompt - 1]]],
            "1 stream": short[:1],
            "4 streams": short[1:],
        }


def _round(
    running: Sequence[Process], prompts: dict[str, list[list[int]]], steps: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Let every contender do each of the round's tasks; return tokens a second and CPU seconds."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for task, asked in prompts.items():
        tokens = len(asked[0]) if task == "prefill" else steps * len(asked)
        for process in running:
            kind = "prefill" if task == "prefill" else "decode"
            answer = process.ask(kind=kind, prompts=asked, steps=steps)
            rate = {"per_second": tokens / answer["seconds"], "cpu": answer["cpu_seconds"]}
            if "token" in answer:
                rate["token"] = answer["token"]
            found.setdefault(process.entrant.name, {})[task] = rate
    return found


def _figures(
    running: Sequence[Process],
    rounds: Sequence[dict[str, dict[str, dict[str, float]]]],
    absent: dict[str, str],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Take medians over rounds; the spread is that of all rounds."""
    versions = {name: text for each in running for name, text in each.versions.items()}
    contenders = {}
    for process in running:
        name = process.entrant.name
        tasks = {}
        for task in rounds[0][name]:
            rates = [each[name][task]["per_second"] for each in rounds]
            tasks[task] = {
                "per_second": statistics.median(rates),
                "least": min(rates),
                "most": max(rates),
            }
        firsts = [each[name]["prefill"]["token"] for each in rounds]
        contenders[name] = {"tasks": tasks, "first_tokens": firsts}
    settings = {"prompt": options.prompt, "steps": options.steps, "rounds": len(rounds)}
    return {
        **settings,
        "weights": options.weights.name,
        "versions": versions,
        "contenders": contenders,
        "absent": absent,
    }


def _tables(figures: dict[str, Any]) -> list[str]:
    tasks = ("1 stream", "4 streams", "prefill")
    heads = ("tokens/s", *(f"{task} (range)" for task in tasks))
    lines = [
        [name, *(_cell(contender["tasks"][task]) for task in tasks)]
        for name, contender in figures["contenders"].items()
    ]
    lines += [[name, "absent", reason, ""] for name, reason in figures["absent"].items()]
    text = (
        f"Medians of {figures['rounds']} rounds; prefill of {figures['prompt']} tokens, "
        f"{figures['steps']} tokens of a stream after 32 of a prompt."
    )
    return [text, "", record.table(heads, lines)]


def _cell(rate: dict[str, float]) -> str:
    return f"{rate['per_second']:.1f} ({rate['least']:.1f}-{rate['most']:.1f})"
