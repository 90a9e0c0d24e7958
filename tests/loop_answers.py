"""Answers of every skill and their whole outcome, to compare decode paths."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

import msgspec
from legato_engine.core.assembly import Assembly
from legato_engine.errors import LegatoError
from legato_engine.sequence import Sequence
from legato_engine.types import Event, FinishReason, RequestKey

from benchmarks.decode.loops import Decodes, picture, question, recorded, skilled, values_of
from benchmarks.speculation.run import RecordedTask


class Tolerant(Decodes):
    """Keeps the failures."""

    def __init__(self, assembly: Assembly, *, at_once: int) -> None:
        self.failures: list[LegatoError] = []
        super().__init__(assembly, at_once=at_once)

    def failed(self, sequence: Sequence, error: LegatoError) -> None:
        self.failures.append(error)


class EndsAtOnce(RecordedTask):
    """A task that ends with its first token."""

    @property
    def finish_reason(self) -> FinishReason | None:
        return FinishReason.STOP if self.tokens else None


class Ask(NamedTuple):
    """A request of one of the skills, or a question, after some steps of the earlier ones."""

    kind: int
    length: int
    logprobs: bool
    after: int


class Ended(Tolerant):
    """Keeps the finish reasons, and the events by sequence."""

    def __init__(self, assembly: Assembly, *, depth: int) -> None:
        super().__init__(assembly, at_once=1)
        self.scheduler = assembly.scheduler(self, pipeline_depth=depth, observer=self.committed)
        self.reasons: dict[int, FinishReason] = {}
        self.events: dict[int, list[Event]] = {}

    def delta(self, sequence: Sequence, events: Many[Event]) -> None:
        self.events.setdefault(sequence.seq_id, []).extend(events)

    def done(self, sequence: Sequence, reason: FinishReason) -> None:
        self.reasons[sequence.seq_id] = reason


def results(assembly: Assembly, asked: list[Ask], depth: int) -> tuple[list[object], Ended]:
    """What each request came to: tokens, values, log-probabilities, events, end and result."""
    image, run = picture(assembly), Ended(assembly, depth=depth)
    sequences = [
        skilled(assembly, image, ask.kind, ask.length, logprobs=ask.logprobs)
        if ask.kind < 5
        else question(assembly, ask.kind, ask.length)
        for ask in asked
    ]
    tasks = recorded(sequences)
    for index, (ask, sequence) in enumerate(zip(asked, sequences, strict=True)):
        sequence.request = msgspec.structs.replace(
            sequence.request, request_id=RequestKey(f"{index}")
        )
        for _ in range(ask.after):
            run.scheduler.step()
        run.scheduler.submit(sequence)
    run.scheduler.drain()
    return [
        (
            values_of(sequence, task),
            run.events.get(sequence.seq_id),
            run.reasons[sequence.seq_id],
            task.result(run.reasons[sequence.seq_id]),
        )
        for sequence, task in zip(sequences, tasks, strict=True)
    ], run
