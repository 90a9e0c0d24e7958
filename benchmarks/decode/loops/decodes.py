"""Sequences whose tokens are kept, and runs of them whose decodes are counted."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Self

from legato_engine.core.assembly import Assembly
from legato_engine.scheduler.batch import LaunchKind, Plan, StepRecord
from legato_engine.scheduler.interfaces import Pause, sleep
from legato_engine.scheduler.output import SilentSink
from legato_engine.scheduler.scheduler import Scheduler
from legato_engine.sequence import Sequence as EngineSequence

from benchmarks.speculation.run import RecordedTask


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
            observer=self,
        )

    @classmethod
    def timed(
        cls, assembly: Assembly, *, at_once: int, depth: int = 2, shares: bool = False
    ) -> Self:
        """A run whose time counts.

        What runs leave is collected before, not within it: scheduler and observer have each other.
        """
        gc.collect()
        return cls(assembly, at_once=at_once, depth=depth, shares=shares)

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
