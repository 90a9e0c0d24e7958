"""Decode loops, by a WHILE node and in the resident kernel, beside a launch for every step.

One model, one run.

    python -m benchmarks loops --device cuda --model moondream2 --random-weights

`step`: milliseconds of a decode step of `--streams` answers, by wall time from the last first token
to the first last one. `host`: microseconds of CPU of the whole process for a token of one answer.
`launches`, `waits`: decodes of one answer, and waits of the host for one to end. `blocking` is the
graph with one launch at a time. `join`: how long a request that arrives while others decode waits
for its first token. `--steps` of short answers of every skill, with random lengths, arrivals and
aborts, are compared with each other: tokens, values and log-probabilities depend on the question
alone.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from legato_engine.bench.command import model_config
from legato_engine.bench.options import add_model_arguments
from legato_engine.bench.workload import Workload, fixed_length
from legato_engine.core import (
    CachedImage,
    CaptionTask,
    DetectTask,
    ImageInfo,
    PointTask,
    QueryTask,
    Request,
    RequestKey,
    SamplingParams,
    SegmentTask,
)
from legato_engine.engine.assembly import Assembly, assemble, with_decode_path
from legato_engine.engine.engine_core import make_sequence
from legato_engine.errors import TaskUnsupported
from legato_engine.models.frontend import PreparedImage
from legato_engine.scheduler.launch import LaunchKind, Plan
from legato_engine.scheduler.scheduler import Scheduler
from legato_engine.scheduler.sink import SilentSink
from legato_engine.scheduler.step_record import StepRecord
from legato_engine.sequence import Sequence as EngineSequence
from PIL import Image

from benchmarks import record
from benchmarks.speculation.run import RecordedTask

PATHS = ("graph", "loop", "resident")
"""The last one only where the kernel runs."""
STEPS = {
    "blocking": ("graph", 1),
    "graph": ("graph", 2),
    "loop": ("loop", 2),
    "resident": ("resident", 2),
}
"""Decode path and launches in flight by the names of steps."""

_MS = 1e3
_LIVE = 6  # requests of the random part at once
_SKILLS = 5
_KINDS = 10  # of its questions, and of its other requests


class Decodes(SilentSink):
    """Runs sequences and counts their decodes."""

    def __init__(
        self, assembly: Assembly, *, at_once: int, depth: int = 2, shares: bool = False
    ) -> None:
        self.launches = self.waits = self.steps = 0
        self.plans: list[Plan] = []
        self.scheduler: Scheduler = assembly.scheduler(
            self, pipeline_depth=depth, prefills_per_decode=at_once, shares=shares, observer=self
        )

    def committed(self, launched: StepRecord) -> None:
        self.plans.append(launched.launch.plan)
        if launched.launch.plan.kind is LaunchKind.DECODE:
            self.launches += 1
            self.waits += launched.wait_end > launched.wait_start  # for the end of the launch
            self.steps += launched.num_followed or 1


def recorded(sequences: Sequence[EngineSequence]) -> list[RecordedTask]:
    tasks = []
    for index, sequence in enumerate(sequences):
        task = RecordedTask(sequence.task)
        sequence.task, sequence.seq_id = task, index
        tasks.append(task)
    return tasks


def steps_of(
    assembly: Assembly, streams: int, length: int, context: int, depth: int = 2
) -> dict[str, Any]:
    """One run of equal answers."""
    workload = Workload(assembly, kind="query", count=streams, length=length, context=context)
    return timed_steps(assembly, workload.sequences(), depth)


def lists_of(assembly: Assembly, streams: int, num_objects: int, depth: int = 2) -> dict[str, Any]:
    """One run of lists of as many objects about a known image, which cannot end before."""
    image = picture(assembly)
    with endless_lists(assembly):
        sequences = []
        for index in range(streams):
            request = Request(
                request_id=RequestKey(f"list-{index}"),
                task=DetectTask(object=f"thing {index}", max_objects=num_objects),
                image=CachedImage(image_id="picture"),
                sampling=SamplingParams(max_tokens=3 * num_objects + 1),
            )
            sequences.append(make_sequence(assembly.frontend, request, image))
        return timed_steps(assembly, sequences, depth)


@contextlib.contextmanager
def endless_lists(assembly: Assembly) -> Iterator[None]:
    """Where a coordinate may come, the end of the list may not."""
    constraints_CV = assembly.runner._resources.constraints_CV
    before_CV = constraints_CV.clone()
    for index, constraint in enumerate(assembly.frontend.constraints):
        allowed = constraint.allowed or ()
        if len(allowed) == 2:  # a coordinate or the end
            end = min(allowed)
            constraints_CV[index, end] = -torch.inf
    yield
    constraints_CV.copy_(before_CV)


def timed_steps(assembly: Assembly, sequences: list[EngineSequence], depth: int) -> dict[str, Any]:
    """Milliseconds of a step of all sequences, and what the host had to do."""
    streams = len(sequences)
    tasks = recorded(sequences)
    run = Decodes(assembly, at_once=streams, depth=depth)
    for sequence in sequences:
        run.scheduler.submit(sequence)
    while any(len(task.tokens) < 2 for task in tasks):
        run.scheduler.step()
    launches, waits, cpu = run.launches, run.waits, time.process_time()
    have = len(tasks[0].tokens)
    run.scheduler.drain()
    cpu = time.process_time() - cpu
    begin = max(task.times[1] for task in tasks)
    end = min(task.times[-1] for task in tasks)
    num_steps = min(len(task.times) for task in tasks) - 2
    return {
        "ms": (end - begin) / num_steps * _MS,
        "host_us": cpu * 1e6 / (len(tasks[0].tokens) - have) / streams,
        "launches": run.launches - launches,
        "waits": run.waits - waits,
        "tokens": [task.tokens for task in tasks],
    }


def joins(assembly: Assembly, streams: int, count: int, context: int) -> list[float]:
    """Milliseconds from a request's arrival to its first token, while `streams` others decode."""
    draw = random.Random(7)
    waits = []
    for _ in range(count):
        workload = Workload(assembly, kind="query", count=streams, length=120, context=context)
        sequences = [*workload.sequences(), question(assembly, streams, 2)]
        *tasks, late = recorded(sequences)
        run = Decodes(assembly, at_once=streams)
        for sequence in sequences[:-1]:
            run.scheduler.submit(sequence)
        have = draw.randint(20, 80)
        while len(tasks[0].tokens) < have:
            run.scheduler.step()
        arrival = time.perf_counter()
        run.scheduler.submit(sequences[-1])
        while not late.tokens:
            run.scheduler.step()
        waits.append((late.times[0] - arrival) * _MS)
        run.scheduler.drain()
    return waits


def load(assembly: Assembly, callers: int, num_tokens: int, *, lists: bool = False) -> float:
    """Tokens a second when each of `callers` asks again as soon as it has an answer.

    Questions, or `lists` of objects and points about a known image; as in a server, prompts share
    launches with decodes.
    """
    draw, image = random.Random(3), picture(assembly)
    run = Decodes(assembly, at_once=1, shares=True)
    live: list[tuple[EngineSequence, RecordedTask]] = []
    count = committed = 0
    begin = time.perf_counter()
    while committed < num_tokens:
        while len(live) < callers:
            length = draw.randint(8, 64)
            if lists:
                kind = _SKILLS * (count // 2) + count % 2  # detections and points in turn
                sequence = skilled(assembly, image, kind, length)
            else:
                sequence = question(assembly, count, length)
            (task,) = recorded([sequence])
            sequence.seq_id = count
            count += 1
            run.scheduler.submit(sequence)
            live.append((sequence, task))
        run.scheduler.step()
        for each in [each for each in live if each[0].finalized]:
            live.remove(each)
            committed += len(each[1].tokens)
    seconds = time.perf_counter() - begin
    run.scheduler.drain()
    return committed / seconds


def question(assembly: Assembly, index: int, length: int) -> EngineSequence:
    """A question of its own, answered with `length` tokens, greedily or not."""
    temperature = (0.0, 0.7)[index % 2]
    request = Request(
        request_id=RequestKey(f"question-{index}"),
        task=QueryTask(question=f"{index}: what is there?"),
        sampling=SamplingParams(temperature=temperature, seed=index, max_tokens=length),
    )
    sequence = make_sequence(assembly.frontend, request, None)
    constraints = range(len(assembly.frontend.constraints))
    return fixed_length(sequence, length, 0, constraints)


def picture(assembly: Assembly) -> PreparedImage:
    info = ImageInfo(image_id="picture", width=64, height=48, cache_hit=False)
    pixels = np.random.default_rng(1).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    return assembly.frontend.prepare_image(Image.fromarray(pixels), "picture", info)


def skilled(
    assembly: Assembly, image: PreparedImage, index: int, length: int, *, logprobs: bool = False
) -> EngineSequence:
    """One of the skills about an image, a caption if the model lacks it, with an answer that ends
    where it ends, or after `length` tokens.
    """
    label = f"thing {index}"
    task = (
        DetectTask(object=label, max_objects=length),
        PointTask(object=label, max_objects=length),
        QueryTask(question=label, reasoning=True),
        SegmentTask(object=label),
        CaptionTask(),
    )[index % _SKILLS]
    request = Request(
        request_id=RequestKey(f"skill-{index}"),
        task=task,
        image=CachedImage(image_id="picture"),
        sampling=SamplingParams(seed=index, max_tokens=length),
        logprobs=logprobs,
        return_tokens=logprobs,
    )
    try:
        return make_sequence(assembly.frontend, request, image)
    except TaskUnsupported:
        caption = msgspec.structs.replace(request, task=CaptionTask())
        return make_sequence(assembly.frontend, caption, image)


def values_of(sequence: EngineSequence, task: RecordedTask) -> list[tuple[object, ...]]:
    """What the device chose for an answer: tokens and, where it has any, values with their
    certainty, and log-probabilities.
    """
    payload, logprobs = sequence.task.has_payload, sequence.request.logprobs
    return [
        (
            token.token_id,
            *((token.payload, token.certainty) if payload else ()),
            *((token.logprob,) if logprobs else ()),
        )
        for token in task.sampled
    ]


def randomly(
    assembly: Assembly, num_steps: int, seed: int, *, skills: bool = True
) -> dict[str, int]:
    """Answers of random lengths that come and are aborted at random, against each one alone.

    Without `skills` all are questions.
    """
    draw = random.Random(seed)
    run = Decodes(assembly, at_once=1, shares=True)
    live: list[tuple[int, int, EngineSequence, RecordedTask]] = []
    taken: dict[int, list[tuple[object, ...]]] = {}
    totals = dict.fromkeys(("answers", "aborted", "different"), 0)
    count = 0
    image = picture(assembly)

    def make(kind: int, length: int) -> EngineSequence:
        if kind % 2 or not skills:
            return question(assembly, kind, length)
        return skilled(assembly, image, kind // 2, length, logprobs=kind // 2 % 3 == 0)

    def check(kind: int, sequence: EngineSequence, task: RecordedTask) -> None:
        """Tokens depend on the question alone, so a longer answer begins with a shorter one."""
        longest, tokens = taken.setdefault(kind, []), values_of(sequence, task)
        both = min(len(longest), len(tokens))
        totals["different"] += longest[:both] != tokens[:both]
        if len(tokens) > len(longest):
            taken[kind] = tokens

    while run.steps < num_steps:
        if len(live) < _LIVE and draw.random() < 0.2:
            kind, length = draw.randint(0, 2 * _KINDS - 1), draw.randint(2, 60)
            sequence = make(kind, length)
            sequence.request = msgspec.structs.replace(
                sequence.request, request_id=RequestKey(f"{count}")
            )
            (task,) = recorded([sequence])
            sequence.seq_id = count
            count += 1
            run.scheduler.submit(sequence)
            live.append((kind, length, sequence, task))
        if live and draw.random() < 0.02:
            run.scheduler.abort(draw.choice(live)[2].request.request_id)
            totals["aborted"] += 1
        run.scheduler.step()
        for each in [each for each in live if each[2].finalized]:
            live.remove(each)
            check(each[0], each[2], each[3])
            totals["answers"] += 1
    run.scheduler.drain()
    return totals | {"steps": run.steps, "launches": run.launches}


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    most = max(arguments.streams) + 1
    config = msgspec.structs.replace(
        model_config(arguments), max_running=most, max_waiting=2 * most + _LIVE, crops_per_launch=0
    )
    graph = assemble(config)
    assemblies = {path: with_decode_path(graph, path) for path in PATHS[1:]}
    if not assemblies["resident"].runner.resident_rows:  # loops stand in for it
        del assemblies["resident"]
    assemblies = {"graph": graph, **assemblies}
    context, objects = arguments.context, arguments.length // 3

    def answers(assembly: Assembly, streams: int, depth: int) -> dict[str, Any]:
        return steps_of(assembly, streams, arguments.length, context, depth)

    def lists(assembly: Assembly, streams: int, depth: int) -> dict[str, Any]:
        return lists_of(assembly, streams, objects, depth)

    rows, list_rows = (
        [_row(assemblies, streams, arguments.repeats, run) for streams in arguments.streams]
        for run in (answers, lists)
    )
    waits = {
        path: joins(assembly, 1, arguments.joins, arguments.context)
        for path, assembly in assemblies.items()
    }
    loads = [
        _loads(assemblies, callers, arguments.load, lists=lists)
        for lists in (False, True)
        for callers in arguments.streams
    ]
    totals = {
        path: randomly(assembly, arguments.steps, seed=1)
        for path, assembly in assemblies.items()
        if path != "graph"
    }
    graph.device.close()
    figures = {
        "model": msgspec.to_builtins(graph.info),
        "rows": rows,
        "lists": list_rows,
        "join_ms": waits,
        "loads": loads,
        "random": totals,
    }
    heads = (
        *("of", "streams", "path", "step ms", "host us a token", "launches", "waits"),
        "same tokens",
    )
    lines = [
        (what, *_cells(row, name))
        for what, of in (("answers", rows), ("lists", list_rows))
        for row in of
        for name in STEPS
        if name in row
    ]
    join = [
        (path, f"{statistics.median(taken):.2f}", f"{max(taken):.2f}")
        for path, taken in waits.items()
    ]
    tables = [
        record.table(heads, lines),
        "",
        record.table(("path", "join P50 ms", "slowest ms"), join),
        "",
        record.table(
            ("callers", "ask for", "path", "tokens/s", "of graph"),
            [_load_cells(row, path) for row in loads for path in assemblies],
        ),
        "",
        record.table(
            ("path", *totals["loop"]), [(path, *each.values()) for path, each in totals.items()]
        ),
    ]
    record.write(arguments.name, "Decode loops", figures, tables)
    different = any(each["different"] for each in totals.values())
    return 1 if different or not all(row["identical"] for row in (*rows, *list_rows)) else 0


def _row(
    assemblies: dict[str, Assembly],
    streams: int,
    repeats: int,
    run_once: Callable[[Assembly, int, int], dict[str, Any]],
) -> dict[str, Any]:
    """Medians over runs in turns."""
    runs: dict[str, list[dict[str, Any]]] = {
        name: []
        for name, (path, _) in STEPS.items()
        if path in assemblies
        and (path != "resident" or streams <= assemblies[path].runner.resident_rows)
    }
    for repeat in range(repeats + 1):
        for name in list(runs) if repeat % 2 else reversed(runs):
            path, depth = STEPS[name]
            runs[name].append(run_once(assemblies[path], streams, depth))
    tokens = runs["graph"][0]["tokens"]
    own = {
        name: taken[0]["tokens"] if name == "resident" else tokens for name, taken in runs.items()
    }
    row: dict[str, Any] = {
        "streams": streams,
        "identical": all(
            run["tokens"] == own[name] for name, taken in runs.items() for run in taken
        ),
    }
    for path, all_runs in runs.items():
        kept = all_runs[1:]
        row[path] = {
            what: statistics.median(run[what] for run in kept)
            for what in ("ms", "host_us", "launches", "waits")
        }
        row[path]["all_ms"] = [run["ms"] for run in kept]
    return row


def _loads(
    assemblies: dict[str, Assembly], callers: int, num_tokens: int, *, lists: bool
) -> dict[str, Any]:
    """Tokens a second of each path, in turns."""
    taken: dict[str, list[float]] = {path: [] for path in assemblies}
    for path in (*assemblies, *reversed(assemblies)):
        taken[path].append(load(assemblies[path], callers, num_tokens, lists=lists))
    return {"callers": callers, "lists": lists, **taken}


def _load_cells(row: dict[str, Any], path: str) -> tuple[object, ...]:
    graph, own = (statistics.mean(row[each]) for each in ("graph", path))
    what = "lists" if row["lists"] else "answers"
    return row["callers"], what, path, f"{own:.0f}", f"{own / graph:.3f}"


def _cells(row: dict[str, Any], path: str) -> tuple[object, ...]:
    of = row[path]
    times = f"{of['ms']:.3f}", f"{of['host_us']:.0f}"
    return row["streams"], path, *times, of["launches"], of["waits"], row["identical"]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks loops", description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--name", default="loops", help="of the record")
    parser.add_argument("--streams", default=[1, 8, 32], type=_numbers, help="e.g. 1,8,32")
    parser.add_argument("--length", default=256, type=int, help="tokens of an answer")
    parser.add_argument("--context", default=722, type=int, help="position of the first token")
    parser.add_argument("--repeats", default=3, type=int, help="timed runs of each path")
    parser.add_argument("--joins", default=30, type=int, help="requests that join")
    parser.add_argument("--load", default=3000, type=int, help="tokens of each run under load")
    parser.add_argument("--steps", default=20_000, type=int, help="of answers that come and go")
    return parser.parse_args(argv)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
