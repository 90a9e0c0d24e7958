"""What a decode step costs the running engine, and what pipelining is worth to it.

Steps are read in pairs: a decode launch and the decode launch committed before it. Nothing sleeps
between the two, so the parts and the period are those of a busy engine.
"""

from __future__ import annotations

import collections
from typing import NamedTuple

import numpy as np

from legato_engine.ipc.messages import PipelineStats
from legato_engine.scheduler.launch import LaunchKind
from legato_engine.telemetry.cost_model import predicted_speedup
from legato_engine.telemetry.timeline import Step

_INTERVAL = 0.5  # seconds between two reports of a busy engine
_NS_PER_MS = 1e6


class StepParts(NamedTuple):
    """One step, in nanoseconds.

    `sampling` includes the copy back. `bookkeeping` is plan, launch, finalize and commit on the
    host; `wait` is the host's in front of the copy. `idle` is the device's: between the sampling of
    the step before and this forward, and between this forward and its sampling.

    `blocking` estimates the same step in a blocking loop: forward, sampling, and all that the host
    does in a period, which is the period less the time it was blocked by a copy under way. Only
    enqueueing the sampling is hidden there too, under the forward.
    """

    period: int
    forward: int
    sampling: int
    bookkeeping: int
    wait: int
    idle: int
    blocking: int


_Counts = tuple[int, int, int, int, int]
"""Rows, how many were zombies, and of the others the tokens committed, proposed and accepted."""


def step_parts(before: Step, step: Step) -> StepParts:
    """The parts of `step`; `before` is the step committed before it."""
    record, times = step.record, step.times
    period = record.commit_end - before.record.commit_end
    forward = times.forward_end - times.forward_start
    sampling = times.copy_end - times.sample_start
    finalize = record.sample_ns
    blocked = max(0, min(times.copy_end, record.wait_end) - record.wait_start)
    return StepParts(
        period=period,
        forward=forward,
        sampling=sampling,
        bookkeeping=record.launch_end - record.plan_start + finalize + record.commit_ns,
        wait=record.wait_end - record.wait_start,
        idle=(times.forward_start - before.times.sample_end)
        + (times.sample_start - times.forward_end),
        blocking=forward + sampling + period - blocked - min(finalize, forward),
    )


class StepStats:
    """A `timeline.StepListener` that keeps the parts of the last `window` decode steps.

    A step costs some subtractions and a place in a ring; medians are taken when a report is due.
    """

    def __init__(self, window: int = 256) -> None:
        self._ring: collections.deque[tuple[StepParts, _Counts]] = collections.deque(maxlen=window)
        self._num_steps = 0
        self._num_tokens = 0
        self._previous: Step | None = None
        self._report: PipelineStats | None = None
        self._reported_steps = 0
        self._due = 0.0

    def add(self, step: Step) -> None:
        """Count a step; prefills only by their tokens."""
        record = step.record
        rows = record.launch.plan.rows
        self._num_tokens += record.tokens
        previous, self._previous = self._previous, step
        if previous is None or not (_is_decode(previous) and _is_decode(step)):
            return
        counts = (len(rows), record.zombies, record.tokens, record.drafted, record.accepted)
        self._ring.append((step_parts(previous, step), counts))
        self._num_steps += 1

    def report(self, now: float, *, fresh: bool) -> PipelineStats | None:
        """The latest snapshot, renewed when it is `_INTERVAL` old, or at once when `fresh`.

        `now` is in seconds on any one clock. None until there is a snapshot.
        """
        if self._num_steps != self._reported_steps and (fresh or now >= self._due):
            self._report = self.snapshot()
            self._reported_steps = self._num_steps
            self._due = now + _INTERVAL
        return self._report

    def snapshot(self) -> PipelineStats | None:
        """Medians over the window, None while it is empty.

        The prediction sets the estimated blocking step against the measured period. Its tax is the
        zombies' share of the rows, each counted as a full row: they share the forward with the
        others, so the gain is a lower bound. A blocking engine's own gain is about nothing.
        """
        if not self._ring:
            return None
        parts, counts = zip(*self._ring, strict=True)
        rows, zombies, tokens, proposed, accepted = (
            sum(each) for each in zip(*counts, strict=True)
        )
        period, forward, sampling, bookkeeping, wait, idle, blocking = (
            float(ns) / _NS_PER_MS for ns in np.median(np.array(parts), axis=0)
        )
        zombie_ratio = zombies / rows
        lively = max(1, rows - zombies)
        return PipelineStats(
            num_steps=len(parts),
            num_tokens=self._num_tokens,
            rows=rows / len(parts),
            step_ms=period,
            forward_ms=forward,
            sampling_ms=sampling,
            bookkeeping_ms=bookkeeping,
            wait_ms=wait,
            idle_ms=idle,
            blocking_ms=blocking,
            zombie_ratio=zombie_ratio,
            predicted_gain=predicted_speedup(blocking, period, zombie_ratio) - 1.0,
            tokens_per_row=tokens / lively,
            proposed_per_row=proposed / lively,
            acceptance=accepted / max(1, proposed),
        )


def _is_decode(step: Step) -> bool:
    return step.record.launch.plan.kind is LaunchKind.DECODE
