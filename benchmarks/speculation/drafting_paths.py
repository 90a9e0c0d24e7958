"""Drafting steps in loops beside a launch for each, with speculation and without; one model.

    python -m benchmarks drafting_paths --device cuda --model moondream2 --random-weights

Without `--texts`, `--streams` equal answers of `--length` tokens are drafted by an oracle, right at
`--rate`. With it, the prompts of each file are answered greedily, one at a time or `--streams` at
once, with the engine's own draft; times include the prompts. Runs of all settings and paths are in
turns, and figures are medians.

`host`: microseconds of CPU of the whole process for a token. `launches`: decodes; `waits`: of the
host for one to end. `same`: tokens are those of single steps without speculation, block sizes those
of single steps. An answer that ends by itself is fed for some steps more, which `budget` counts
among all requests.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from legato_engine.bench.command import model_config
from legato_engine.bench.options import add_model_arguments
from legato_engine.bench.workload import Workload
from legato_engine.config import SPECULATION_OFF
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.kernels.proposer import Proposer
from legato_engine.sequence import Sequence as EngineSequence
from legato_engine.speculation import TokenBudgetPolicy

from benchmarks import record, shared_options
from benchmarks.decode.loops import Decodes, recorded
from benchmarks.speculation.oracle import OracleProposer, known_history
from benchmarks.speculation.report import oracle_for
from benchmarks.speculation.run import RecordedTask, with_settings
from benchmarks.speculation.workloads import read_texts, text_requests

_US, _MS = 1e6, 1e3
_HEADS = (
    *("workload", "streams", "setting", "path", "tokens/s", "step ms", "host us a token"),
    *("tokens a verify", "launches", "same tokens and blocks"),
)
_TIMES = ("tokens_per_second", "step_ms", "host_us")

Make = Callable[[Assembly], list[EngineSequence]]


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    most = max(arguments.streams)
    config = msgspec.structs.replace(
        model_config(arguments), max_running=most, max_waiting=2 * most, crops_per_launch=0
    )
    assembly = assemble(config)
    texts = read_texts(arguments.texts) if arguments.texts else {}
    rows = _texts(assembly, texts, arguments) if texts else _equal_answers(assembly, arguments)
    assembly.device.close()
    figures = {"model": msgspec.to_builtins(assembly.info), "rows": rows}
    table = record.table(_HEADS, _cells(rows))
    record.write(arguments.name, "Loops of drafting steps", figures, [table])
    return 0 if all(row["same_tokens"] for row in rows) else 1


def _equal_answers(assembly: Assembly, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    known_by, proposer = oracle(assembly, max(arguments.streams))
    paths = _all_paths(assembly, arguments.settings, proposer)
    rows = []
    for streams in arguments.streams:
        workload = Workload(
            assembly,
            kind="query",
            count=streams,
            length=arguments.length,
            context=arguments.context,
        )
        asked, lengths = workload.sequences(), [arguments.length] * streams
        teach(known_by, asked, answer(assembly, asked, lengths), arguments.rate)
        name = f"right at {arguments.rate}"

        def make(of: Assembly, workload: Workload = workload) -> list[EngineSequence]:
            del of  # all have one frontend
            return workload.sequences()

        rows += _rows(name, streams, make, streams, paths, arguments)
    return rows


def _texts(
    assembly: Assembly, texts: dict[str, tuple[str, ...]], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    paths = _all_paths(assembly, arguments.settings, None)
    rows = []
    for streams in arguments.streams:
        for name, prompts in texts.items():

            def make(of: Assembly, prompts: Sequence[str] = prompts) -> list[EngineSequence]:
                return text_requests(of, prompts, length=arguments.length)

            rows += _rows(name, streams, make, min(streams, len(prompts)), paths, arguments)
    return rows


def _all_paths(
    assembly: Assembly, settings: Sequence[str], proposer: Proposer | None
) -> dict[str, Paths]:
    named = (SPECULATION_OFF, *settings)
    return {
        each: both_paths(assembly, each, None if each == SPECULATION_OFF else proposer)
        for each in named
    }


def _rows(
    workload: str,
    streams: int,
    make: Make,
    at_once: int,
    paths: dict[str, Paths],
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Medians of runs in turns; the first run of each is a warm-up."""
    ways = [(setting, path) for setting in paths for path in PATHS]
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {way: [] for way in ways}
    for repeat in range(arguments.repeats + 1):
        for way in ways if repeat % 2 else reversed(ways):
            setting, path = way
            assembly = getattr(paths[setting], path)
            runs[way].append(_run(assembly, make, at_once, arguments.length))
    plain = runs[SPECULATION_OFF, "graph"][0]["tokens"]
    rows = []
    for way in ways:
        setting, path = way
        kept = runs[way][1:]
        single = runs[setting, "graph"][-1]
        same_tokens = all(each["tokens"] == plain for each in runs[way])
        same = {"same_tokens": same_tokens, "same_blocks": kept[-1]["blocks"] == single["blocks"]}
        row = {name: statistics.median(each[name] for each in kept) for name in _TIMES}
        row |= {f"all_{name}": [each[name] for each in kept] for name in _TIMES}
        counts = {name: kept[-1][name] for name in ("launches", "waits", "verified", "num_tokens")}
        named = {"workload": workload, "streams": streams, "setting": setting, "path": path}
        rows.append({**named, **row, **counts, **same})
    return rows


def _run(assembly: Assembly, make: Make, at_once: int, length: int) -> dict[str, Any]:
    requests = make(assembly)
    tokens: list[list[int]] = []
    blocks: list[list[int]] = []
    launches = waits = steps = 0
    cpu, begin = time.process_time(), time.perf_counter()
    for first in range(0, len(requests), at_once):
        wave = requests[first : first + at_once]
        answers = answer(assembly, wave, [length] * len(wave))
        tokens += answers.tokens
        blocks += answers.blocks
        launches += answers.run.launches
        waits += answers.run.waits
        steps += answers.run.steps
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    num_tokens = sum(map(len, tokens))
    verified = sum(map(len, blocks)) or num_tokens - len(requests)
    return {
        "tokens_per_second": num_tokens / seconds,
        "step_ms": seconds / steps * _MS,
        "host_us": cpu * _US / num_tokens,
        "launches": launches,
        "waits": waits,
        "verified": verified,
        "num_tokens": num_tokens - len(requests),  # the first comes with the prompt
        "tokens": tokens,
        "blocks": blocks,
    }


def _cells(rows: Sequence[dict[str, Any]]) -> list[tuple[object, ...]]:
    return [
        (
            *(row[name] for name in ("workload", "streams", "setting", "path")),
            f"{row['tokens_per_second']:.0f}",
            f"{row['step_ms']:.3f}",
            f"{row['host_us']:.0f}",
            f"{row['num_tokens'] / row['verified']:.2f}",
            row["launches"],
            "yes" if row["same_tokens"] and row["same_blocks"] else "NO",
        )
        for row in rows
    ]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    prog = "python -m benchmarks drafting_paths"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--name", default="drafting_paths", help="of the record")
    parser.add_argument("--streams", default=[1, 8], type=shared_options.numbers, help="e.g. 1,8")
    parser.add_argument("--settings", default=("seed", "budget"), type=shared_options.names)
    shared_options.add_equal_answers(parser)
    parser.add_argument("--rate", default=0.7, type=float, help="of the oracle's right tokens")
    parser.add_argument(
        "--texts", type=Path, help="a folder of real prompts, as benchmarks/speculation/texts"
    )
    return parser.parse_args(argv)


# ---------------------------------------------------------------- paths
# Answers by drafting steps, a launch for each or in loops, with drafts of known quality.

PATHS = ("graph", "loop")


class Paths(NamedTuple):
    """The same model by single steps and in loops, both with the same costs of steps."""

    graph: Assembly
    loop: Assembly


class Answers(NamedTuple):
    """Tokens and block sizes by request, and what ran."""

    tasks: list[RecordedTask]
    blocks: list[list[int]]
    run: Decodes

    @property
    def tokens(self) -> list[list[int]]:
        return [task.tokens for task in self.tasks]


def both_paths(
    assembly: Assembly,
    setting: str,
    proposer: Proposer | None = None,
    costs: TokenBudgetPolicy | None = None,
) -> Paths:
    """`budget` goes by `costs`, else by those that single steps have."""
    made = Paths(*(_on_path(assembly, path, setting, proposer) for path in PATHS))
    if setting == "budget":
        costs = costs or TokenBudgetPolicy(made.graph.runner.costs().table())
        for each in made:
            each.runner.set_costs(costs)
    return made


def _on_path(assembly: Assembly, path: str, setting: str, proposer: Proposer | None) -> Assembly:
    return with_settings(assembly, proposer, decode_path=path, speculation=setting)


def oracle(assembly: Assembly, most: int) -> tuple[OracleProposer, Proposer]:
    """One for up to `most` requests, which knows none yet."""
    return oracle_for(assembly, capacity=(most, assembly.model.max_context))


def teach(
    known_by: OracleProposer, asked: Sequence[EngineSequence], answers: Answers, rate: float
) -> None:
    """Let an oracle draft these answers, each token right at this rate."""
    known = [
        known_history(sequence.prefix_length, sequence.prompt, tokens)
        for sequence, tokens in zip(asked, answers.tokens, strict=True)
    ]
    known_by.know(known, rates=[rate])


def answer(
    assembly: Assembly, asked: Sequence[EngineSequence], lengths: Sequence[int], depth: int = 2
) -> Answers:
    """Run requests at once; with `lengths` the device foresees their ends."""
    tasks = recorded(asked)
    run = Decodes(assembly, at_once=len(asked), depth=depth)
    for sequence, task, length in zip(asked, tasks, lengths, strict=True):
        task.max_tokens = length
        run.scheduler.submit(sequence)
    run.scheduler.drain()
    blocks = [each.draft_stats.block_size_history for each in asked]
    return Answers(tasks, blocks, run)


def off(assembly: Assembly) -> Assembly:
    """Without speculation, by single steps."""
    return _on_path(assembly, "graph", SPECULATION_OFF, None)
