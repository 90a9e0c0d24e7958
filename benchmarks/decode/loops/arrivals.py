"""Requests that arrive while others decode.

One that waits, callers that ask again when they have an answer, and answers that are aborted at
random.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from legato_engine.bench.workload import Workload
from legato_engine.core.assembly import Assembly
from legato_engine.scheduler.batch import StepRecord
from legato_engine.scheduler.interfaces import Pause
from legato_engine.sequence import Sequence as EngineSequence
from legato_engine.types import RequestKey

from benchmarks.decode.loops.decodes import (
    NUM_SKILLS,
    Decodes,
    picture,
    question,
    recorded,
    skilled,
    values_of,
)
from benchmarks.speculation.run import RecordedTask

MAX_LIVE = 6
"""Requests of `randomly` at once."""

_KINDS = 10  # of its questions, and of its other requests
_MS, _NS = 1e3, 1e9
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
