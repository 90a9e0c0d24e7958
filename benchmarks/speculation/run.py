"""One run of a workload with one setting, and its figures."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence

import msgspec
import numpy as np
from legato_engine.config import check
from legato_engine.core.assembly import Assembly
from legato_engine.kernels.proposer import Proposer
from legato_engine.runtime.warm_up import warm_runner
from legato_engine.scheduler.batch import LaunchKind, StepRecord
from legato_engine.scheduler.interfaces import LaunchTimes
from legato_engine.scheduler.output import SilentSink
from legato_engine.sequence import SampledToken, Task
from legato_engine.sequence import Sequence as EngineSequence
from legato_engine.types import Event, FinishReason, RequestKey, TaskOutput

_PERCENTILES = (50, 95, 99)
_MS = 1e3
_NS_PER_US, _NS_PER_MS = 1e3, 1e6
_SETTLED = 4  # a request is settled in its last quarter
_SURE = 1.96  # standard errors of a 95 % interval


def with_settings(
    assembly: Assembly, proposer: Proposer | None = None, **settings: str
) -> Assembly:
    """Return the same model and KV cache with another `speculation` or `decode_path`.

    Never use both at once.

    Raises:
        InvalidField: a setting is unknown or excluded by another, or the draft cannot be used.
    """
    config = msgspec.structs.replace(assembly.config, **settings)
    check(config)
    runner = warm_runner(
        config,
        assembly.model,
        assembly.device,
        assembly.kv,
        bank=assembly.bank,
        refiner=assembly.refiner,
        draft=assembly.draft,
        proposer=proposer,
    )
    return dataclasses.replace(assembly, config=config, runner=runner)


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """A run over time, in milliseconds since its start.

    `blocks` has, by request and verification: the time of the commit, the number of draft tokens,
    and the average acceptance after it. `kv_use` is the share of KV pages held by live requests, by
    decode. `gaps_ms` are the percentiles 0 to 100 of the time between two tokens.
    """

    blocks: list[list[tuple[float, int, float]]]
    kv_use: list[tuple[float, float]]
    gaps_ms: list[float]


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """One setting on one workload.

    Times are in milliseconds, `tick_us` in microseconds of the host. `tokens_per_second` includes
    prefills; `decode_tokens_per_second` counts only while all requests of a wave decode (from first
    to last token if more requests wait than there are streams). `first_token_ms` starts at the
    submission. `gap_ms` is between two tokens of a request as delivered, and the tokens of a block
    arrive together. `forward_ms` and `sample_ms` are device times, medians over decodes of the most
    rows.

    Block sizes are those really proposed; `settled_blocks` are means over the last quarter of each
    request. `tokens_per_verify` is what a row commits per step. `acceptance` is of the tokens
    proposed, `right` of the tokens tried (all up to the first wrong one), and `right_within` its 95
    % interval. `kv_hit_rate` and `fragmentation` are the cache's own; `kv_peak` is the largest
    share of pages held by live requests. `identical`: every token equals the plain run's.
    """

    workload: str
    streams: int
    setting: str
    tokens_per_second: float
    decode_tokens_per_second: float
    first_token_ms: dict[str, float]
    gap_ms: dict[str, float]
    forward_ms: float
    sample_ms: float
    tick_us: float
    num_tokens: int
    num_steps: int
    acceptance: float
    num_tried: int
    right: float
    right_within: tuple[float, float]
    mean_block_size: float
    block_size_variance: float
    settled_blocks: list[float]  # by request
    tokens_per_verify: float
    kv_hit_rate: float
    fragmentation: float
    kv_peak: float
    preemptions: int
    identical: bool
    series: Series


class RecordedTask:
    """A task that keeps its tokens and the times of their commits."""

    grammar = None

    def __init__(self, inner: Task) -> None:
        self._inner = inner
        self.tokens: list[int] = []
        self.sampled: list[SampledToken] = []
        self.times: list[float] = []
        self.prompt = inner.prompt
        self.sampling = inner.sampling
        self.max_tokens = inner.max_tokens
        self.constrained = inner.constrained
        self.uses_transition_table = inner.uses_transition_table
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
        return self._inner.constraint()

    def consume(self, token: SampledToken) -> Sequence[Event]:
        """Record the token and pass it on."""
        self.tokens.append(token.token_id)
        self.sampled.append(token)
        self.times.append(time.perf_counter())
        return self._inner.consume(token)

    def result(self, finish_reason: FinishReason) -> TaskOutput:
        return self._inner.result(finish_reason)


class Run(SilentSink):
    """Fresh sequences, run to their ends in waves of `at_once` (0: all at once)."""

    def __init__(
        self, assembly: Assembly, sequences: Sequence[EngineSequence], at_once: int = 0
    ) -> None:
        self.sequences = sequences
        self._streams = assembly.config.max_running
        self._runner = assembly.runner
        self._tasks = [RecordedTask(sequence.task) for sequence in sequences]
        self._submitted: list[float] = []
        self._records: list[StepRecord] = []
        self._times: list[LaunchTimes] = []
        self._averages: dict[RequestKey, list[tuple[float, float]]] = {}
        self._kv_use: list[tuple[float, float]] = []
        self._scheduler = assembly.scheduler(
            self,
            pipeline_depth=2,
            prefills_per_decode=len(sequences),
            shares=False,
            observer=self.committed,
        )
        at_once = at_once or len(sequences)
        self._waves = [slice(at, at + at_once) for at in range(0, len(sequences), at_once)]
        self._start = time.perf_counter()
        for index, (sequence, task) in enumerate(zip(sequences, self._tasks, strict=True)):
            sequence.task = task
            sequence.seq_id = index  # breaks ties of eviction between requests of one age
        for wave in self._waves:
            for sequence in sequences[wave]:
                self._submitted.append(time.perf_counter())
                self._scheduler.submit(sequence)
            self._scheduler.drain()
        self.seconds = time.perf_counter() - self._start

    def committed(self, record: StepRecord) -> None:
        """Record a decode: device times, and the state of policy and cache."""
        if record.launch.plan.kind is not LaunchKind.DECODE:
            return
        self._records.append(record)
        self._times.append(self._runner.times(record.launch))
        load, now = self._scheduler.load(), self._now()
        self._kv_use.append((now, load.pages_used / load.pages_total))
        for row in record.launch.plan.rows:
            drafting = row.sequence.draft_stats
            if drafting.learnt is None:
                continue
            averages = self._averages.setdefault(row.sequence.request.request_id, [])
            for _ in range(len(averages), len(drafting.block_size_history)):  # a loop's steps
                averages.append((now, drafting.learnt.ema_acceptance_rate))

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of each request."""
        return [task.tokens for task in self._tasks]

    def figures(self, workload: str, streams: int, setting: str, plain: Run) -> Figures:
        """Compute the figures next to the plain run of the same requests."""
        records, tasks = self._records, self._tasks
        rows = sum(map(_rows, records))
        drafted, accepted = (sum(map(of, records)) for of in (_drafted, _accepted))
        tried = accepted + sum(each.rejected for each in records)
        gaps = [gap * _MS for task in tasks for gap in np.diff(task.times)]
        firsts = [task.times[0] - at for task, at in zip(tasks, self._submitted, strict=True)]
        histories = [each.draft_stats.block_size_history for each in self.sequences]
        blocks = [size for history in histories for size in history] or [0]
        num_tokens = sum(map(len, self.tokens))
        forward_ms, sample_ms = self._device_times()
        kv = self._scheduler.load().kv
        assert kv is not None, "a scheduler has a KV cache"
        return Figures(
            workload=workload,
            streams=streams,
            setting=setting,
            tokens_per_second=num_tokens / self.seconds,
            decode_tokens_per_second=self._decode_rate(),
            first_token_ms=_percentiles([each * _MS for each in firsts]),
            gap_ms=_percentiles(gaps),
            forward_ms=forward_ms,
            sample_ms=sample_ms,
            tick_us=statistics.median(map(_tick_ns, records)) / _NS_PER_US,
            num_tokens=num_tokens,
            num_steps=sum(each.num_steps_read or 1 for each in records),
            acceptance=accepted / max(1, drafted),
            num_tried=tried,
            right=accepted / max(1, tried),
            right_within=interval(accepted, tried),
            mean_block_size=statistics.fmean(blocks),
            block_size_variance=statistics.pvariance(blocks),
            settled_blocks=[_settled(history) for history in histories if history],
            tokens_per_verify=sum(each.tokens for each in records) / rows,
            kv_hit_rate=kv.hit_rate,
            fragmentation=kv.fragmentation_ratio,
            kv_peak=max(use for _, use in self._kv_use),
            preemptions=kv.preemptions,
            identical=self.tokens == plain.tokens,
            series=self._series(gaps),
        )

    def _decode_rate(self) -> float:
        tokens, seconds = 0, 0.0
        for wave in self._waves:
            tasks = self._tasks[wave]
            waits = len(tasks) > self._streams
            begin = (min if waits else max)(task.times[0] for task in tasks)
            end = (max if waits else min)(task.times[-1] for task in tasks)
            tokens += sum(begin < at <= end for task in tasks for at in task.times)
            seconds += max(0.0, end - begin)
        return tokens / seconds if tokens else 0.0

    def _series(self, gaps: Sequence[float]) -> Series:
        blocks = [
            [
                (now, size, average)
                for (now, average), size in zip(
                    self._averages.get(sequence.request.request_id, ()),
                    sequence.draft_stats.block_size_history,
                    strict=True,
                )
            ]
            for sequence in self.sequences
        ]
        return Series(blocks, self._kv_use, np.percentile(gaps, range(101)).tolist())

    def _device_times(self) -> tuple[float, float]:
        """Return mean milliseconds of forwards and samplings, of decodes with the most rows.

        A loop has its sampling in the forward, and counts by its mean step.
        """
        most = max(len(record.launch.plan.rows) for record in self._records)
        launches = [
            (each, record.num_steps_read or 1)
            for record, each in zip(self._records, self._times, strict=True)
            if len(record.launch.plan.rows) == most
        ]
        times = [each for each, _ in launches]
        forward = statistics.median(
            (each.forward_end - each.forward_start) / num_steps for each, num_steps in launches
        )
        sample = statistics.median(each.sample_end - each.sample_start for each in times)
        return forward / _NS_PER_MS, sample / _NS_PER_MS

    def _now(self) -> float:
        return (time.perf_counter() - self._start) * _MS


def interval(accepted: int, tried: int) -> tuple[float, float]:
    """Return the 95 % interval of a rate by Wilson, within 0 and 1; all rates without a sample."""
    if not tried:
        return 0.0, 1.0
    weight = _SURE**2 / tried
    middle = (accepted / tried + weight / 2) / (1 + weight)
    share = accepted / tried
    reach = _SURE * math.sqrt(share * (1 - share) / tried + weight / (4 * tried)) / (1 + weight)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def _rows(record: StepRecord) -> int:
    """Rows that committed tokens, in each step."""
    live = len(record.launch.plan.rows) - record.zombies
    return len(record.blocks) or live * (record.num_steps_read or 1)


def _drafted(record: StepRecord) -> int:
    return record.drafted


def _accepted(record: StepRecord) -> int:
    return record.accepted


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": float(np.percentile(values, p)) for p in _PERCENTILES}


def _settled(history: Sequence[int]) -> float:
    return statistics.fmean(history[-max(1, len(history) // _SETTLED) :])


def _tick_ns(record: StepRecord) -> int:
    sampling = record.sample_end - record.sample_start
    return record.launch_end - record.plan_start + sampling + record.commit_end - record.wait_end
