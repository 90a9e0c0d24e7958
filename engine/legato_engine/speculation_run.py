"""One run of a workload with some speculation, and what it came to."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence

import numpy as np

from legato_engine.assembly import Assembly, SilentSink
from legato_engine.core import Event, FinishReason, TaskResult
from legato_engine.scheduler.launch import LaunchKind
from legato_engine.scheduler.step_record import StepRecord
from legato_engine.sequence import Sequence as EngineSequence
from legato_engine.tasks import SampledToken, Task

_PERCENTILES = (50, 95, 99)
_MS = 1e3


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """One setting on one workload.

    Times are in milliseconds, rates count prefills too. `gap_ms` are percentiles of the time
    between two tokens of a request as they are delivered: those of a block come together. Blocks
    are what was really proposed; `tokens_per_verify` is what a row committed a step. `identical`:
    every token is that of the plain run.
    """

    workload: str
    streams: int
    setting: str
    tokens_per_second: float
    first_token_ms: float
    gap_ms: dict[str, float]
    num_tokens: int
    num_steps: int
    acceptance: float
    mean_block_size: float
    block_size_variance: float
    tokens_per_verify: float
    identical: bool
    block_size_history: list[list[int]]  # by request


class RecordedTask:
    """Another task, whose tokens and the times of their commits are kept."""

    def __init__(self, inner: Task) -> None:
        self._inner = inner
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.prompt = inner.prompt
        self.sampling = inner.sampling
        self.max_tokens = inner.max_tokens
        self.constrained = inner.constrained
        self.has_payload = inner.has_payload

    @property
    def finish_reason(self) -> FinishReason | None:
        """The inner task's."""
        return self._inner.finish_reason

    @property
    def reasoning_tokens(self) -> int:
        """The inner task's."""
        return self._inner.reasoning_tokens

    def constraint(self) -> int:
        """The inner task's."""
        return self._inner.constraint()

    def consume(self, token: SampledToken) -> Sequence[Event]:
        """What the inner task makes of the token."""
        self.tokens.append(token.token_id)
        self.times.append(time.perf_counter())
        return self._inner.consume(token)

    def result(self, finish_reason: FinishReason) -> TaskResult:
        """The inner task's."""
        return self._inner.result(finish_reason)


class Run(SilentSink):
    """Some fresh sequences, run to their ends: together, or one by one where one may run."""

    def __init__(self, assembly: Assembly, sequences: Sequence[EngineSequence]) -> None:
        self.sequences = sequences
        self._tasks = [RecordedTask(sequence.task) for sequence in sequences]
        self._submitted: list[float] = []
        self._records: list[StepRecord] = []
        scheduler = assembly.scheduler(
            self,
            pipeline_depth=2,
            prefills_per_decode=len(sequences),
            shares=False,
            observer=self,
        )
        start = time.perf_counter()
        for sequence, task in zip(sequences, self._tasks, strict=True):
            sequence.task = task
            self._submitted.append(time.perf_counter())
            scheduler.submit(sequence)
            if assembly.config.max_running == 1:
                scheduler.drain()
        scheduler.drain()
        self.seconds = time.perf_counter() - start

    def committed(self, record: StepRecord) -> None:
        """Keep a decode's record."""
        if record.launch.plan.kind is LaunchKind.DECODE:
            self._records.append(record)

    @property
    def tokens(self) -> list[list[int]]:
        """Those of each request."""
        return [task.tokens for task in self._tasks]

    def figures(self, workload: str, streams: int, setting: str, plain: Run) -> Figures:
        """What it came to, beside the plain run of the same requests."""
        records, tasks = self._records, self._tasks
        rows = sum(len(each.launch.plan.rows) - each.zombies for each in records)
        proposed = sum(each.proposed for each in records)
        gaps = [gap for task in tasks for gap in np.diff(task.times)]
        firsts = [task.times[0] - at for task, at in zip(tasks, self._submitted, strict=True)]
        histories = [s.drafting.block_size_history for s in self.sequences if s.drafting]
        blocks = [size for history in histories for size in history] or [0]
        num_tokens = sum(map(len, self.tokens))
        return Figures(
            workload=workload,
            streams=streams,
            setting=setting,
            tokens_per_second=num_tokens / self.seconds,
            first_token_ms=statistics.median(firsts) * _MS,
            gap_ms={f"p{p}": float(np.percentile(gaps, p)) * _MS for p in _PERCENTILES},
            num_tokens=num_tokens,
            num_steps=len(records),
            acceptance=sum(each.accepted for each in records) / max(1, proposed),
            mean_block_size=statistics.fmean(blocks),
            block_size_variance=statistics.pvariance(blocks),
            tokens_per_verify=sum(each.tokens for each in records) / rows,
            identical=self.tokens == plain.tokens,
            block_size_history=histories,
        )
