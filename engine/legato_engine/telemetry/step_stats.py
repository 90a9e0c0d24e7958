"""Statistics of the running engine's decode steps.

Only a decode after a decode is measured: the engine does not sleep between the two.
"""

from __future__ import annotations

import collections
from typing import NamedTuple

import numpy as np

from legato_engine.ipc.figures import PipelineStats
from legato_engine.scheduler.launch import LaunchKind
from legato_engine.telemetry.cost_model import predicted_speedup
from legato_engine.telemetry.timeline import Step

_INTERVAL = 0.5  # seconds between snapshots of a busy engine
_NS_PER_MS = 1e6


class StepParts(NamedTuple):
    """The parts of one step, in nanoseconds.

    `sampling` includes the copy back. `bookkeeping` is the host's plan, launch, enqueueing of the
    sampling, and commit; `wait` its wait for the copy. `idle` is the device's.

    `blocking` estimates the step in a blocking loop: forward, sampling, and the period without the
    time in which the copy blocked the host. Only the enqueueing of the sampling would overlap.
    """

    period: int
    forward: int
    sampling: int
    bookkeeping: int
    wait: int
    idle: int
    blocking: int


_Counts = tuple[int, int, int, int, int]
"""Rows, zombies among them, and the others' tokens: committed, drafted, accepted."""


def step_parts(before: Step, step: Step) -> StepParts:
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
    """A `timeline.StepListener` over the last `window` decode steps."""

    def __init__(self, window: int = 256) -> None:
        self._ring: collections.deque[tuple[StepParts, _Counts]] = collections.deque(maxlen=window)
        self._num_steps = 0
        self._num_tokens = 0
        self._previous: Step | None = None
        self._latest: PipelineStats | None = None
        self._latest_steps = 0
        self._due = 0.0

    def add(self, step: Step) -> None:
        """Prefills and loops count only by their tokens; all figures are of one depth."""
        record = step.record
        rows = record.launch.plan.rows
        self._num_tokens += record.tokens
        previous, self._previous = self._previous, step
        if previous is not None and previous.record.launch.depth != record.launch.depth:
            self._ring.clear()
            return
        if previous is None or not (_is_decode(previous) and _is_decode(step)):
            return
        counts = (len(rows), record.zombies, record.tokens, record.drafted, record.accepted)
        self._ring.append((step_parts(previous, step), counts))
        self._num_steps += 1

    def latest(self, now: float, *, fresh: bool) -> PipelineStats | None:
        """Renewed if it is `_INTERVAL` old or `fresh`; `now` is in seconds."""
        if self._num_steps != self._latest_steps and (fresh or now >= self._due):
            self._latest = self.snapshot()
            self._latest_steps = self._num_steps
            self._due = now + _INTERVAL
        return self._latest

    def snapshot(self) -> PipelineStats | None:
        """Medians over the window.

        The predicted gain is a lower bound, because its tax counts each zombie as a full row. The
        observed gain compares the time that all steps of the window took, stalls included, with the
        sum of their blocking estimates.
        """
        if not self._ring:
            return None
        parts, counts = zip(*self._ring, strict=True)
        times = np.array(parts)
        rows, zombies, tokens, proposed, accepted = (
            sum(each) for each in zip(*counts, strict=True)
        )
        period, forward, sampling, bookkeeping, wait, idle, blocking = (
            float(ns) / _NS_PER_MS for ns in np.median(times, axis=0)
        )
        elapsed, _, _, _, _, _, blocked = (float(ns) for ns in times.sum(axis=0))
        zombie_ratio = zombies / rows
        live_rows = max(1, rows - zombies)
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
            tokens_per_row=tokens / live_rows,
            proposed_per_row=proposed / live_rows,
            acceptance=accepted / max(1, proposed),
            observed_gain=predicted_speedup(blocked, elapsed, zombie_ratio) - 1.0,
        )


def _is_decode(step: Step) -> bool:
    """A loop has no pipeline to describe."""
    plan = step.record.launch.plan
    return plan.kind is LaunchKind.DECODE and not plan.loops
