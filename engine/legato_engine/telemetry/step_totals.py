"""Totals over all launches since the engine's start."""

from __future__ import annotations

import bisect
import collections

from legato_engine.ipc.figures import SECONDS_BOUNDS, Durations, StepTotals
from legato_engine.scheduler.launch import LaunchKind
from legato_engine.telemetry.timeline import Step

_NS = 1e-9


class _Bins:
    """A histogram of seconds with the bounds `SECONDS_BOUNDS`."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS_BOUNDS) + 1)
        self._total = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self._counts[bisect.bisect_left(SECONDS_BOUNDS, seconds)] += count
        self._total += seconds * count

    def durations(self) -> Durations:
        return Durations(tuple(self._counts), self._total)


class StepCounter:
    """A `timeline.StepListener`.

    The time between two tokens of a request is that between the commits of two decodes, prefills of
    other requests between them included; after a pause of the engine it begins with the prefill.
    Tokens of one block share it.
    """

    def __init__(self) -> None:
        self._launches: collections.Counter[str] = collections.Counter()
        self._blocks: collections.Counter[int] = collections.Counter()
        self._step_times = _Bins()
        self._token_gaps = _Bins()
        self._tokens = self._drafted = self._accepted = 0
        self._decode_ns = self._idle_ns = 0
        self._previous: Step | None = None
        self._tokens_at = 0  # the commit from which the next token's time counts, in nanoseconds

    def add(self, step: Step) -> None:
        record, plan = step.record, step.record.launch.plan
        previous, self._previous = self._previous, step
        self._launches[plan.kind.value] += 1
        self._tokens += record.tokens
        if record.drafted:
            self._drafted += record.drafted
            self._accepted += record.accepted
            self._blocks.update(filter(None, record.blocks))
        if previous is None or record.plan_start > previous.record.commit_end:  # after a pause
            self._tokens_at = record.commit_end
            return
        if plan.kind is LaunchKind.DECODE:
            self._add_decode(previous, step)
        if plan.kind is LaunchKind.DECODE or plan.num_mixed_decodes:
            self._add_gap(step)
            self._tokens_at = record.commit_end

    def _add_decode(self, previous: Step, step: Step) -> None:
        if previous.record.launch.plan.kind is not LaunchKind.DECODE:
            return
        period = step.record.commit_end - previous.record.commit_end
        num_steps = step.record.num_followed or 1
        self._step_times.add(period * _NS / num_steps, num_steps)
        self._decode_ns += period
        times = step.times
        idle = times.forward_start - previous.times.sample_end
        self._idle_ns += max(0, idle + times.sample_start - times.forward_end)

    def _add_gap(self, step: Step) -> None:
        record = step.record
        num_rows = len(record.launch.plan.decodes) - record.zombies
        if num_rows > 0 and record.tokens > 0:
            is_decode = record.launch.plan.kind is LaunchKind.DECODE
            num_tokens = max(record.tokens, num_rows) if is_decode else num_rows
            gap = (record.commit_end - self._tokens_at) * _NS
            self._token_gaps.add(gap * num_rows / num_tokens, num_tokens)

    def totals(self) -> StepTotals:
        return StepTotals(
            launches=dict(self._launches),
            tokens=self._tokens,
            step_times=self._step_times.durations(),
            token_gaps=self._token_gaps.durations(),
            decode_seconds=self._decode_ns * _NS,
            idle_seconds=self._idle_ns * _NS,
            drafted=self._drafted,
            accepted=self._accepted,
            blocks=dict(self._blocks),
        )
