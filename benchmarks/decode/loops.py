"""Decode loops, by a WHILE node and in the resident kernel, beside a launch for every step.

One model, one run:

    python -m benchmarks loops --device cuda --model moondream2 --random-weights

Tests run its sequences, too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self
from unittest import mock

import msgspec
import numpy as np
import torch
from legato_engine.bench.command import model_config
from legato_engine.bench.options import add_model_arguments
from legato_engine.bench.workload import Workload, fixed_length
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.core.process import freeze_loaded
from legato_engine.core.requests import make_sequence
from legato_engine.errors import TaskUnsupported
from legato_engine.models.frontend import PreparedImage
from legato_engine.scheduler.batch import LaunchKind, Plan, StepRecord
from legato_engine.scheduler.interfaces import Pause, sleep
from legato_engine.scheduler.output import SilentSink
from legato_engine.scheduler.scheduler import Scheduler
from legato_engine.sequence import Sequence as EngineSequence
from legato_engine.types import (
    CachedImageRef,
    CaptionSpec,
    DetectSpec,
    ImageProperties,
    PointSpec,
    QuerySpec,
    Request,
    RequestKey,
    SamplingParams,
    SegmentSpec,
)
from PIL import Image

from benchmarks import record, shared_options
from benchmarks.speculation.run import RecordedTask, with_settings

# ---------------------------------------------------------------- decodes
# Sequences whose tokens are kept, and runs of them whose decodes are counted.


# ---------------------------------------------------------------- requests

# Requests of every skill.

NUM_SKILLS = 5


def question(
    assembly: Assembly, index: int, length: int, said: str = "what is there?"
) -> EngineSequence:
    """Make a question of its own, answered with `length` tokens, greedily or not."""
    temperature = (0.0, 0.7)[index % 2]
    request = Request(
        request_id=RequestKey(f"question-{index}"),
        task=QuerySpec(question=f"{index}: {said}"),
        sampling=SamplingParams(temperature=temperature, seed=index, max_tokens=length),
    )
    sequence = make_sequence(assembly.frontend, request, None)
    constraints = range(len(assembly.frontend.constraints))
    return fixed_length(sequence, length, 0, constraints)


def picture(assembly: Assembly) -> PreparedImage:
    info = ImageProperties(image_id="picture", width=64, height=48, cache_hit=False)
    pixels = np.random.default_rng(1).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    return assembly.frontend.prepare_image(Image.fromarray(pixels), "picture", info)


def skilled(
    assembly: Assembly, image: PreparedImage, index: int, length: int, *, logprobs: bool = False
) -> EngineSequence:
    """Make one of the skills about an image, a caption if the model lacks it.

    The answer ends where it ends, or after `length` tokens.
    """
    label = f"thing {index}"
    task = (
        DetectSpec(object=label, max_objects=length),
        PointSpec(object=label, max_objects=length),
        QuerySpec(question=label, reasoning=True),
        SegmentSpec(object=label),
        CaptionSpec(),
    )[index % NUM_SKILLS]
    request = Request(
        request_id=RequestKey(f"skill-{index}"),
        task=task,
        image=CachedImageRef(image_id="picture"),
        sampling=SamplingParams(seed=index, max_tokens=length),
        logprobs=logprobs,
        return_tokens=logprobs,
    )
    try:
        return make_sequence(assembly.frontend, request, image)
    except TaskUnsupported:
        caption = msgspec.structs.replace(request, task=CaptionSpec())
        return make_sequence(assembly.frontend, caption, image)


# ---------------------------------------------------------------- decodes


class Decodes(SilentSink):
    """Runs sequences and counts their decodes."""

    def __init__(
        self,
        assembly: Assembly,
        *,
        at_once: int,
        depth: int = 2,
        shares: bool = False,
        pause: Pause = sleep,
    ) -> None:
        self.launches = self.waits = self.steps = 0
        self.plans: list[Plan] = []
        self.scheduler: Scheduler = assembly.scheduler(
            self,
            pipeline_depth=depth,
            prefills_per_decode=at_once,
            shares=shares,
            pause=pause,
            observer=self.committed,
        )

    @classmethod
    def timed(
        cls, assembly: Assembly, *, at_once: int, depth: int = 2, shares: bool = False
    ) -> Self:
        """Make a run whose time counts.

        What runs leave is collected before, not within it: scheduler and observer have each other.
        """
        gc.collect()
        return cls(assembly, at_once=at_once, depth=depth, shares=shares)

    def committed(self, launched: StepRecord) -> None:
        self.plans.append(launched.launch.plan)
        if launched.launch.plan.kind is LaunchKind.DECODE:
            self.launches += 1
            self.waits += launched.wait_end > launched.wait_start  # for the end of the launch
            self.steps += launched.num_steps_read or 1


def recorded(sequences: Sequence[EngineSequence]) -> list[RecordedTask]:
    tasks = []
    for index, sequence in enumerate(sequences):
        task = RecordedTask(sequence.task)
        sequence.task, sequence.seq_id = task, index
        tasks.append(task)
    return tasks


def values_of(sequence: EngineSequence, task: RecordedTask) -> list[tuple[object, ...]]:
    """Return an answer's tokens and log-probabilities, with values and certainty if it has any."""
    payload, logprobs = sequence.task.has_payload, sequence.request.logprobs
    return [
        (
            token.token_id,
            *((token.payload, token.certainty) if payload else ()),
            *((token.logprob,) if logprobs else ()),
        )
        for token in task.sampled
    ]


# ---------------------------------------------------------------- steps
# Milliseconds of a decode step of equal answers, and of lists.


_MS = 1e3


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
                task=DetectSpec(object=f"thing {index}", max_objects=num_objects),
                image=CachedImageRef(image_id="picture"),
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
    run = Decodes.timed(assembly, at_once=streams, depth=depth)
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


# ---------------------------------------------------------------- arrivals
# Requests that arrive while others decode.
#
# One that waits, callers that ask again when they have an answer, and answers that are aborted at
# random.


MAX_LIVE = 6
"""Requests of `randomly` at once."""

_KINDS = 10  # of its questions, and of its other requests
_NS = 1e9
_SOON = 2e-3  # seconds, some steps


class Join(NamedTuple):
    """Delays of a request, in milliseconds from its arrival.

    `begun`: until its prompt's launch begins on the device, at the latest; `answered`: until its
    first token.
    """

    begun: float
    answered: float


class _Prompts(Decodes):
    """Decodes that note when a sequence's prompt began on the device, in `time.perf_counter_ns`.

    That is the launch's duration before the host saw its end. Device and host clocks drift apart by
    some 0.1 ms in a few seconds.
    """

    def __init__(
        self, assembly: Assembly, sequence: EngineSequence, pause: Pause, *, at_once: int
    ) -> None:
        super().__init__(assembly, at_once=at_once, pause=pause)
        self._runner, self._sequence = assembly.runner, sequence
        self.begun_ns = 0

    def committed(self, launched: StepRecord) -> None:
        super().committed(launched)
        prompts = [row.sequence for row in launched.launch.plan.prefills]
        if self._sequence in prompts and not self.begun_ns:
            times = self._runner.times(launched.launch)
            self.begun_ns = launched.wait_end - (times.copy_end - times.forward_start)


class _Arrival:
    """The moment at which a request comes, in `time.perf_counter`."""

    at = math.inf

    def pause(self, seconds: float) -> bool:
        """Sleep, or return early once the request has arrived, as an engine's `Pause` does."""
        time.sleep(max(0.0, min(seconds, self.at - time.perf_counter())))
        return self.is_over

    @property
    def is_over(self) -> bool:
        return time.perf_counter() >= self.at


def joins(assembly: Assembly, streams: int, count: int, context: int) -> list[Join]:
    """How long requests wait that arrive at any moment while `streams` others decode."""
    draw = random.Random(7)
    waits = []
    for _ in range(count):
        workload = Workload(assembly, kind="query", count=streams, length=120, context=context)
        sequences = [*workload.sequences(), question(assembly, streams, 2)]
        *tasks, late = recorded(sequences)
        arrival = _Arrival()
        run = _Prompts(assembly, sequences[-1], arrival.pause, at_once=streams)
        for sequence in sequences[:-1]:
            run.scheduler.submit(sequence)
        have = draw.randint(20, 80)
        while len(tasks[0].tokens) < have:
            run.scheduler.step()
        arrival.at = at = time.perf_counter() + draw.uniform(0.0, _SOON)
        while not arrival.is_over:
            run.scheduler.step()
        arrival.at = math.inf
        run.scheduler.submit(sequences[-1])
        while not late.tokens:
            run.scheduler.step()
        begun = run.begun_ns / _NS - at
        waits.append(Join(begun * _MS, (late.times[0] - at) * _MS))
        run.scheduler.drain()
    return waits


class Answer(NamedTuple):
    """Of a request that was submitted at `asked`, in `time.perf_counter`."""

    sequence: EngineSequence
    task: RecordedTask
    asked: float


class Answers(NamedTuple):
    """What a run returned in so many seconds."""

    ended: list[Answer]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(len(each.task.tokens) for each in self.ended) / self.seconds


def ask_again(
    assembly: Assembly, callers: int, num_tokens: int, make: Callable[[int], EngineSequence]
) -> Answers:
    """Answer until `num_tokens` are committed, with `callers` that ask again after each answer.

    `make` gets the number of requests before. As in a server, prompts share launches with decodes.
    """
    run = Decodes.timed(assembly, at_once=1, shares=True)
    live: list[Answer] = []
    ended: list[Answer] = []
    count = committed = 0
    begin = time.perf_counter()
    while committed < num_tokens:
        while len(live) < callers:
            sequence = make(count)
            (task,) = recorded([sequence])
            sequence.seq_id = count
            count += 1
            run.scheduler.submit(sequence)
            live.append(Answer(sequence, task, time.perf_counter()))
        run.scheduler.step()
        for each in [each for each in live if each.sequence.finalized]:
            live.remove(each)
            ended.append(each)
            committed += len(each.task.tokens)
    seconds = time.perf_counter() - begin
    run.scheduler.drain()
    return Answers(ended, seconds)


def load(assembly: Assembly, callers: int, num_tokens: int, *, lists: bool = False) -> float:
    """Tokens a second when each of `callers` asks again as soon as it has an answer.

    Questions, or `lists` of objects and points about a known image.
    """
    draw, image = random.Random(3), picture(assembly)

    def make(count: int) -> EngineSequence:
        length = draw.randint(8, 64)
        if not lists:
            return question(assembly, count, length)
        kind = NUM_SKILLS * (count // 2) + count % 2  # detections and points in turn
        return skilled(assembly, image, kind, length)

    return ask_again(assembly, callers, num_tokens, make).tokens_per_second


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
        if len(live) < MAX_LIVE and draw.random() < 0.2:
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


# ---------------------------------------------------------------- run
# `step`: milliseconds of a decode step of `--streams` answers, by wall time from the last first
# token to the first last one. `host`: microseconds of CPU of the whole process for a token of
# one answer. `launches`, `waits`: decodes of one answer, and waits of the host for one to end.
# `same tokens`: whether all are the graph's, in every run. `blocking` is the graph with one
# launch at a time. `join`: how long a request that arrives while others decode waits for its
# prompt to begin on the device, and for its first token. `tokens/s` under load are medians of
# runs in turns. `--steps` of short answers of every skill, with random lengths, arrivals and
# aborts, are compared with each other: tokens, values and log-probabilities depend on the
# question alone. With `--late` warps of the resident kernel sleep at random around every wait
# and signal.


PATHS = ("graph", "loop", "resident")
"""The last one only where the kernel runs."""
STEPS = {
    "blocking": ("graph", 1),
    "graph": ("graph", 2),
    "loop": ("loop", 2),
    "resident": ("resident", 2),
}
"""Decode path and launches in flight by the names of steps."""
LOAD_TURNS = 4


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    assemblies = _assemblies(arguments)
    figures = _figures(assemblies, arguments)
    assemblies["graph"].device.close()
    record.write(arguments.name, "Decode loops", figures, _tables(figures))
    different = any(each["different"] for each in figures["random"].values())
    same = all(row["identical"] for row in (*figures["rows"], *figures["lists"]))
    return 0 if same and not different else 1


def _assemblies(arguments: argparse.Namespace) -> dict[str, Assembly]:
    """One model with each path, the graph first."""
    most = max(arguments.streams) + 1
    config = msgspec.structs.replace(
        model_config(arguments),
        max_running=most,
        max_waiting=2 * most + MAX_LIVE,
        crops_per_launch=0,
    )
    graph = assemble(config)
    # The folder may have been removed.
    from legato_engine.kernels.megakernel import offer
    from legato_engine.kernels.megakernel.kernel import MegakernelBuild

    late = functools.partial(MegakernelBuild, delays=arguments.late)
    with mock.patch.object(offer, "MegakernelBuild", late):
        others = {path: with_settings(graph, decode_path=path) for path in PATHS[1:]}
    if not others["resident"].runner.megakernel_rows:  # loops stand in for it
        del others["resident"]
    freeze_loaded()
    return {"graph": graph, **others}


def _figures(assemblies: dict[str, Assembly], arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the figures of the record."""

    def answers(assembly: Assembly, streams: int, depth: int) -> dict[str, Any]:
        return steps_of(assembly, streams, arguments.length, arguments.context, depth)

    def lists(assembly: Assembly, streams: int, depth: int) -> dict[str, Any]:
        return lists_of(assembly, streams, arguments.length // 3, depth)

    rows, list_rows = (
        [_row(assemblies, streams, arguments.repeats, run) for streams in arguments.streams]
        for run in (answers, lists)
    )
    waits = {
        path: joins(assembly, 1, arguments.joins, arguments.context)
        for path, assembly in assemblies.items()
        if arguments.joins
    }
    loads = [
        _loads(assemblies, callers, callers * arguments.load, lists=lists)
        for lists in (False, True)
        for callers in arguments.streams
        if arguments.load
    ]
    return {
        "model": msgspec.to_builtins(assemblies["graph"].info),
        "rows": rows,
        "lists": list_rows,
        "join_ms": {path: [each._asdict() for each in taken] for path, taken in waits.items()},
        "loads": loads,
        "random": {
            path: randomly(assembly, arguments.steps, seed=1)
            for path, assembly in assemblies.items()
            if path != "graph" and arguments.steps
        },
    }


def _tables(figures: dict[str, Any]) -> list[str]:
    works = ("answers", "rows"), ("lists", "lists")
    steps = [(what, row) for what, of in works for row in figures[of]]
    differing = [
        f"{what} of {row['streams']} streams by {name}"
        for what, row in steps
        for name in STEPS
        if name in row and not row[name]["same_tokens"]
    ]
    tokens = "all paths gave the same tokens" if not differing else "other tokens: "
    totals = figures["random"]
    tables = [
        (("of", "streams", *STEPS), [_step_cells(what, row) for what, row in steps]),
        (
            ("path", "prompt begins, P50 and slowest ms", "first token"),
            [(path, *_join_cells(taken)) for path, taken in figures["join_ms"].items()],
        ),
        (
            ("callers ask for", "callers", "graph, tokens/s", *list(STEPS)[2:]),
            [_load_cells(row) for row in figures["loads"]],
        ),
        (
            ("path", *totals.get("loop", ())),
            [(path, *each.values()) for path, each in totals.items()],
        ),
    ]
    note = (
        f"Steps: ms (host CPU of a token, us); {tokens}{', '.join(differing)}. "
        "The JSON file has launches and waits."
    )
    return ["\n\n".join([note, *(record.table(heads, rows) for heads, rows in tables if rows)])]


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
        and (path != "resident" or streams <= assemblies[path].runner.megakernel_rows)
    }
    for repeat in range(repeats + 1):
        for name in list(runs) if repeat % 2 else reversed(runs):
            path, depth = STEPS[name]
            runs[name].append(run_once(assemblies[path], streams, depth))
    tokens = runs["graph"][0]["tokens"]
    same = {name: all(run["tokens"] == tokens for run in taken) for name, taken in runs.items()}
    row: dict[str, Any] = {"streams": streams, "identical": all(same.values())}
    for path, all_runs in runs.items():
        kept = all_runs[1:]
        row[path] = {
            what: statistics.median(run[what] for run in kept)
            for what in ("ms", "host_us", "launches", "waits")
        }
        row[path]["all_ms"] = [run["ms"] for run in kept]
        row[path]["same_tokens"] = same[path]
    return row


def _loads(
    assemblies: dict[str, Assembly], callers: int, num_tokens: int, *, lists: bool
) -> dict[str, Any]:
    """Tokens a second of each path, in turns."""
    taken: dict[str, list[float]] = {path: [] for path in assemblies}
    for turn in range(LOAD_TURNS):
        for path in assemblies if turn % 2 else reversed(assemblies):
            taken[path].append(load(assemblies[path], callers, num_tokens, lists=lists))
    return {"callers": callers, "lists": lists, **taken}


def _join_cells(taken: Sequence[dict[str, float]]) -> Iterator[str]:
    for what in Join._fields:
        waits = [each[what] for each in taken]
        yield f"{statistics.median(waits):.2f} {max(waits):.2f}"


def _load_cells(row: dict[str, Any]) -> tuple[object, ...]:
    graph, *others = (
        statistics.median(row[path]) if path in row else None for path in list(STEPS)[1:]
    )
    cells = [f"{own:.0f} ({own / graph:.3f})" if own else "-" for own in others]
    return "lists" if row["lists"] else "answers", row["callers"], f"{graph:.0f}", *cells


def _step_cells(what: str, row: dict[str, Any]) -> tuple[object, ...]:
    cells = [f"{row[n]['ms']:.3f} ({row[n]['host_us']:.0f})" if n in row else "-" for n in STEPS]
    return what, row["streams"], *cells


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks loops", description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--name", default="loops", help="of the record")
    parser.add_argument(
        "--streams", default=[1, 8, 32], type=shared_options.numbers, help="e.g. 1,8,32"
    )
    shared_options.add_equal_answers(parser)
    parser.add_argument("--joins", default=30, type=int, help="requests that join; 0: none")
    parser.add_argument(
        "--load", default=600, type=int, help="tokens of a caller in each run under load"
    )
    parser.add_argument("--steps", default=20_000, type=int, help="of answers that come and go")
    parser.add_argument("--late", action="store_true", help="warps of the resident kernel sleep")
    return parser.parse_args(argv)
