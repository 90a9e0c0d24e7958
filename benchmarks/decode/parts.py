"""Prompts that come while others decode, whole and in parts.

    python -m benchmarks parts --device cuda --model moondream2 --random-weights

Each of `--callers` asks again as soon as it has an answer of 8 to 64 tokens, with a question of its
own of so many `--words`; decodes are single steps. Both kinds in turns, medians of all turns but
the first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple
from unittest import mock

import msgspec
from legato_engine.bench.command import model_config
from legato_engine.bench.options import add_model_arguments
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.core.process import freeze_loaded
from legato_engine.runtime.model_runner import ModelRunner
from legato_engine.sequence import Sequence as EngineSequence

from benchmarks import record, shared_options
from benchmarks.decode.loops import ask_again, question

HEADS = (
    *("callers", "prompt tokens", "tokens/s, whole", "chunked", "first token ms, whole", "chunked"),
    *("gap ms, whole: mean, P99", "chunked"),
)
_WORDS = ("what", "is", "on", "the", "table", "beside", "a", "red", "chair", "and", "who", "sits")


class Figures(NamedTuple):
    """Of the answers of one turn; a gap is the time from one token of an answer to the next."""

    tokens_per_s: float
    first_token_ms: float
    gap_ms: float
    gap_p99_ms: float
    prompt_tokens: float


def load(assembly: Assembly, callers: int, num_tokens: int, words: int) -> Figures:
    """Until so many tokens are returned; nothing of a question is cached but BOS."""
    draw = random.Random(3)

    def make(index: int) -> EngineSequence:
        said = " ".join(random.Random(index).choices(_WORDS, k=words))
        return question(assembly, index, draw.randint(8, 64), said)

    answers = ask_again(assembly, callers, num_tokens, make)
    ended = answers.ended
    gaps = [after - before for each in ended for before, after in pairwise(each.task.times)]
    return Figures(
        answers.tokens_per_second,
        statistics.mean(each.task.times[0] - each.asked for each in ended) * 1e3,
        statistics.mean(gaps) * 1e3,
        record.quantiles(gaps, n=100)[-1] * 1e3,
        statistics.mean(len(each.sequence.prompt) for each in ended),
    )


@contextlib.contextmanager
def prompts(assembly: Assembly, kind: str) -> Iterator[None]:
    """Schedulers made meanwhile leave prompts whole, or cut them as an engine does."""
    limits = assembly.runner.limits
    if kind == "whole":
        limits = dataclasses.replace(limits, pass_tokens=0, long_chunk_tokens=0)
    with mock.patch.object(ModelRunner, "limits", limits):
        yield


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks parts", description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--name", default="parts", help="of the record")
    parser.add_argument(
        "--callers", default=[2, 8, 16], type=shared_options.numbers, help="e.g. 2,8,16"
    )
    parser.add_argument(
        "--words", default=[8, 24, 64, 160], type=shared_options.numbers, help="of a question"
    )
    parser.add_argument("--tokens", default=8000, type=int, help="of a turn")
    parser.add_argument("--turns", default=3, type=int, help="of both kinds, besides the first")
    arguments = parser.parse_args(argv)
    config = msgspec.structs.replace(
        model_config(arguments),
        max_running=max(arguments.callers),
        crops_per_launch=0,
        decode_path="graph",
    )
    assembly = assemble(config)
    freeze_loaded()
    rows = [
        _row(assembly, *each, arguments) for each in product(arguments.callers, arguments.words)
    ]
    assembly.device.close()
    figures = {"model": msgspec.to_builtins(assembly.info), "rows": rows}
    cells = [_cells(row) for row in rows]
    record.write(arguments.name, "Prompts in parts", figures, [record.table(HEADS, cells)])
    return 0


def _row(
    assembly: Assembly, callers: int, words: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    taken: dict[str, list[Figures]] = {"whole": [], "parts": []}
    for turn in range(1 + arguments.turns):
        for kind in taken if turn % 2 else reversed(taken):
            with prompts(assembly, kind):
                taken[kind].append(load(assembly, callers, arguments.tokens, words))
    kept = {kind: [each._asdict() for each in runs[1:]] for kind, runs in taken.items()}
    return {"callers": callers, "words": words, **kept}


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    both = whole, parts = [
        Figures(*(statistics.median(run[what] for run in row[kind]) for what in Figures._fields))
        for kind in ("whole", "parts")
    ]
    gain = f"{parts.tokens_per_s:.0f} ({parts.tokens_per_s / whole.tokens_per_s:.3f})"
    return (
        *(row["callers"], f"{whole.prompt_tokens:.0f}", f"{whole.tokens_per_s:.0f}", gain),
        *(f"{each.first_token_ms:.2f}" for each in both),
        *(f"{each.gap_ms:.2f}, {each.gap_p99_ms:.2f}" for each in both),
    )
