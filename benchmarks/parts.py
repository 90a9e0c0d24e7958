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
import gc
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import NamedTuple
from unittest import mock

import msgspec
from legato_engine.bench.command import model_config
from legato_engine.bench.options import add_model_arguments
from legato_engine.bench.workload import fixed_length
from legato_engine.core.request_key import RequestKey
from legato_engine.core.requests import Request, SamplingParams
from legato_engine.core.task_specs import QueryTask
from legato_engine.engine.assembly import Assembly
from legato_engine.engine.loading import assemble
from legato_engine.engine.sequences import make_sequence
from legato_engine.runtime.model_runner import ModelRunner
from legato_engine.sequence import Sequence as EngineSequence

from benchmarks import record
from benchmarks.loops.decodes import Decodes, recorded

HEADS = (
    *("callers", "prompt tokens", "prompts", "tokens/s", "of whole", "first token ms"),
    *("gap ms, mean", "P99"),
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
    """Until so many tokens are returned."""
    draw, run = random.Random(3), Decodes(assembly, at_once=1, shares=True)
    live, first, gaps, prompts = [], list[float](), list[float](), list[int]()
    committed, begin = 0, time.perf_counter()
    while committed < num_tokens:
        while len(live) < callers:
            sequence = question(assembly, len(prompts), draw.randint(8, 64), words)
            (task,) = recorded([sequence])
            sequence.seq_id = len(prompts)
            run.scheduler.submit(sequence)
            live.append((sequence, task, time.perf_counter()))
            prompts.append(len(sequence.prompt))
        run.scheduler.step()
        for each in [each for each in live if each[0].finalized]:
            live.remove(each)
            times = each[1].times
            committed += len(times)
            first.append(times[0] - each[2])
            gaps += [after - before for before, after in pairwise(times)]
    seconds = time.perf_counter() - begin
    run.scheduler.drain()
    return Figures(
        committed / seconds,
        statistics.mean(first) * 1e3,
        statistics.mean(gaps) * 1e3,
        statistics.quantiles(gaps, n=100)[-1] * 1e3,
        statistics.mean(prompts),
    )


def question(assembly: Assembly, index: int, length: int, words: int) -> EngineSequence:
    """Every second one is drawn; nothing of it is cached but BOS."""
    draw = random.Random(index)
    text = " ".join([f"{index}:", *draw.choices(_WORDS, k=words)])
    sampling = SamplingParams(temperature=(0.0, 0.7)[index % 2], seed=index, max_tokens=length)
    key = RequestKey(f"question-{index}")
    request = Request(request_id=key, task=QueryTask(question=text), sampling=sampling)
    sequence = make_sequence(assembly.frontend, request, None)
    return fixed_length(sequence, length, 0, range(len(assembly.frontend.constraints)))


@contextlib.contextmanager
def prompts(assembly: Assembly, kind: str) -> Iterator[None]:
    """Schedulers made meanwhile leave prompts whole, or cut them as an engine does."""
    limits = assembly.runner.limits
    if kind == "whole":
        limits = dataclasses.replace(limits, pass_tokens=0)
    with mock.patch.object(ModelRunner, "limits", limits):
        yield


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks parts", description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--name", default="parts", help="of the record")
    parser.add_argument("--callers", default="8,12,16")
    parser.add_argument("--words", default="2,8", help="of a question")
    parser.add_argument("--tokens", default=8000, type=int, help="of a turn")
    parser.add_argument("--turns", default=3, type=int, help="of both kinds, besides the first")
    arguments = parser.parse_args(argv)
    callers, words = ([int(each) for each in of.split(",")] for of in _lists(arguments))
    config = msgspec.structs.replace(
        model_config(arguments), max_running=max(callers), crops_per_launch=0, decode_path="graph"
    )
    assembly = assemble(config)
    gc.collect()
    gc.freeze()  # as the engine's process does: a collection takes 130 ms
    rows = [_row(assembly, *each, arguments) for each in product(callers, words)]
    assembly.device.close()
    figures = {"model": msgspec.to_builtins(assembly.info), "rows": rows}
    cells = [each for row in rows for each in _cells(row)]
    record.write(arguments.name, "Prompts in parts", figures, [record.table(HEADS, cells)])
    return 0


def _lists(arguments: argparse.Namespace) -> tuple[str, str]:
    return arguments.callers, arguments.words


def _row(
    assembly: Assembly, callers: int, words: int, arguments: argparse.Namespace
) -> dict[str, object]:
    taken: dict[str, list[Figures]] = {"whole": [], "parts": []}
    for turn in range(1 + arguments.turns):
        for kind in taken if turn % 2 else reversed(taken):
            with prompts(assembly, kind):
                taken[kind].append(load(assembly, callers, arguments.tokens, words))
    kept = {kind: [each._asdict() for each in runs[1:]] for kind, runs in taken.items()}
    return {"callers": callers, "words": words, **kept}


def _cells(row: dict[str, object]) -> Iterator[tuple[object, ...]]:
    means = {}
    for kind in ("whole", "parts"):
        runs = row[kind]
        assert isinstance(runs, list)
        each = means[kind] = Figures(
            *(statistics.median(run[what] for run in runs) for what in Figures._fields)
        )
        share = f"{each.tokens_per_s / means['whole'].tokens_per_s:.3f}"
        times = (f"{ms:.2f}" for ms in (each.first_token_ms, each.gap_ms, each.gap_p99_ms))
        speed = f"{each.tokens_per_s:.0f}", share
        yield row["callers"], f"{each.prompt_tokens:.0f}", kind, *speed, *times
