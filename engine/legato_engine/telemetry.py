"""Timeline of the last launches, statistics of decode steps and the cost model of pipelining.

    speedup = T_block / T_pipe * (1 - z)

`T_block` and `T_pipe` are the periods of a step at depth 1 and 2. `z` is the zombie tax: a request
of `L` tokens runs one more step, for a single stream one forward in `L`. In a batch a zombie is one
more row, and costs its share of the time that the rows add to a forward.
"""

from __future__ import annotations

import bisect
import collections
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from legato_engine.ipc.messages import (
    SECONDS_BOUNDS,
    Durations,
    LaunchSpan,
    PipelineStats,
    StepTotals,
    TimelineBatch,
)
from legato_engine.ipc.service_connections import ServiceConnections
from legato_engine.scheduler.batch import Launch, LaunchKind, StepRecord
from legato_engine.scheduler.interfaces import LaunchTimes, Step

LANES = (
    "cpu plan",
    "cpu launch",
    "cpu wait",
    "cpu commit",
    "cpu finalize",
    "device compute",
    "device copy",
    "device idle",
    "slot 0",
    "slot 1",
)
_ARROW = {
    ("cpu launch", "launch"): "s",
    ("device compute", "forward"): "t",
    ("cpu commit", "commit"): "f",
}
"""The spans at which an arrow through a launch starts, passes and ends."""

_ARGS = ("launch", "kind", "rows", "riding", "zombies")
"""The fields of a span that are shown with it."""

TraceEvent = dict[str, Any]

StepListener = Callable[[Step], None]
"""Receives all steps in the order of their commits, on the scheduler's thread; must be fast."""


def step_feed(
    times: Callable[[Launch], LaunchTimes], listeners: Sequence[StepListener]
) -> Callable[[StepRecord], None]:
    """Return an observer that reads a launch's device times once for all listeners.

    It runs on the scheduler's thread while the runner has the launch's times.
    """

    def committed(record: StepRecord) -> None:
        step = Step(record, times(record.launch))
        for listener in listeners:
            listener(step)

    return committed


class Timeline:
    """The last `capacity` launches."""

    def __init__(self, capacity: int) -> None:
        self._steps: collections.deque[Step] = collections.deque(maxlen=capacity)

    @property
    def steps(self) -> list[Step]:
        return list(self._steps)

    def add(self, step: Step) -> None:
        self._steps.append(step)

    def to_json(self) -> str:
        return json.dumps({"traceEvents": trace_events(self.steps), "displayTimeUnit": "ms"})

    def dump(self) -> pathlib.Path:
        """Write the trace to `timeline_path` atomically."""
        path = timeline_path(os.getpid())
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(self.to_json())
        pathlib.Path(file.name).replace(path)
        return path


def timeline_path(pid: int) -> pathlib.Path:
    return pathlib.Path(tempfile.gettempdir()) / f"legato-timeline-{pid}.json"


class SpanMaker:
    """Converter of steps to spans; steps must be added in the order of their commits."""

    def __init__(self) -> None:
        self._previous: Step | None = None

    def spans(self, step: Step) -> list[LaunchSpan]:
        """Return a span per part, plus one per device gap while the host had work for it."""
        record, times = step.record, step.times
        launch = record.launch
        previous, self._previous = self._previous, step
        if previous is not None and launch.launch_id != previous.record.launch.launch_id + 1:
            previous = None  # others were not seen
        # The copy stream runs in order: a copy starts after its sampling and the copy before it.
        copy_start = times.sample_end
        gaps = [(times.forward_end, times.sample_start)]
        if previous is not None:
            copy_start = max(copy_start, previous.times.copy_end)
            # Otherwise nothing was in flight, and only a decode could have followed at once.
            in_flight = record.plan_start <= previous.record.commit_end
            if in_flight or launch.plan.kind is LaunchKind.DECODE:
                gaps.insert(0, (previous.times.sample_end, times.forward_start))
        mask = [("cpu finalize", "mask", record.sample_start, record.mask_end)]
        parts = (
            ("cpu plan", "plan", record.plan_start, record.plan_end),
            ("cpu launch", "launch", record.plan_end, record.launch_end),
            ("cpu finalize", "finalize", record.sample_start, record.sample_end),
            *(mask if record.mask_end else ()),
            ("cpu wait", "wait", record.wait_start, record.wait_end),
            ("cpu commit", "commit", record.wait_end, record.commit_end),
            ("device compute", "forward", times.forward_start, times.forward_end),
            ("device compute", "sample", times.sample_start, times.sample_end),
            ("device copy", "copy", copy_start, max(copy_start, times.copy_end)),
            *(("device idle", "idle", start, end) for start, end in gaps if end > start),
            (f"slot {launch.slot}", "held", record.plan_end, record.commit_end),
        )
        common = (
            launch.launch_id,
            launch.plan.kind.value,
            len(launch.plan.rows),
            launch.plan.num_mixed_decodes,
            record.zombies,
            record.tokens,
        )
        return [
            LaunchSpan(lane, name, start, end - start, *common) for lane, name, start, end in parts
        ]


def trace_events(steps: list[Step]) -> list[TraceEvent]:
    """Return the events in Chrome's trace format, in microseconds."""
    events: list[TraceEvent] = [
        {"ph": "M", "pid": 1, "tid": lane, "name": "thread_name", "args": {"name": name}}
        for lane, name in enumerate(LANES)
    ]
    maker = SpanMaker()
    for step in steps:
        for span in maker.spans(step):
            events += _events(span)
    return events


def _events(span: LaunchSpan) -> list[TraceEvent]:
    place = {"pid": 1, "tid": LANES.index(span.lane), "ts": span.start / 1000}
    events: list[TraceEvent] = [
        {
            **place,
            "ph": "X",
            "name": f"{span.name} {span.launch}",
            "cat": span.kind,
            "dur": span.duration / 1000,
            "args": {name: getattr(span, name) for name in _ARGS},
        }
    ]
    if phase := _ARROW.get((span.lane, span.name)):
        arrow = {"name": "launch", "cat": "launch", "id": span.launch, "bp": "e"}
        events.append({**place, **arrow, "ph": phase})
    return events


# ---------------------------------------------------------------- cost model


def row_share(forward: float, forward_single: float, streams: int) -> float:
    """Return the fraction of a forward's time that is due to its rows, 0..1.

    Both forward times have the same unit.
    """
    if streams == 1:
        return 1.0
    return min(1.0, max(0.0, 1.0 - forward_single / forward))


def zombie_tax(length: float, share: float) -> float:
    return share / length


def predicted_speedup(blocking: float, pipelined: float, tax: float) -> float:
    return blocking / pipelined * (1.0 - tax)


# ---------------------------------------------------------------- step stats

# Only a decode after a decode is measured: the engine does not sleep between the two.

_INTERVAL = 0.5  # seconds between snapshots of a busy engine
_NS_PER_MS = 1e6


class StepParts(NamedTuple):
    """Parts of one step, in nanoseconds.

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
    mask: int = 0


Table = NDArray[np.int64] | NDArray[np.float64]
Column = NDArray[np.int64]
_Counts = tuple[int, int]
"""Rows, and zombies among them."""


def step_parts(before: Step, step: Step) -> StepParts:
    record, times = step.record, step.times
    period = record.commit_end - before.record.commit_end
    forward = times.forward_end - times.forward_start
    sampling = times.copy_end - times.sample_start
    finalize = record.sample_end - record.sample_start
    commit = record.commit_end - record.wait_end
    blocked = max(0, min(times.copy_end, record.wait_end) - record.wait_start)
    return StepParts(
        period=period,
        forward=forward,
        sampling=sampling,
        bookkeeping=record.launch_end - record.plan_start + finalize + commit,
        wait=record.wait_end - record.wait_start,
        idle=(times.forward_start - before.times.sample_end)
        + (times.sample_start - times.forward_end),
        blocking=forward + sampling + period - blocked - min(finalize, forward),
        mask=max(0, record.mask_end - record.sample_start),
    )


class StepStats:
    """Times of the last `window` decode steps; `add` is a `timeline.StepListener`."""

    def __init__(self, window: int = 256) -> None:
        self._ring: collections.deque[tuple[StepParts, _Counts]] = collections.deque(maxlen=window)
        self._num_steps = 0
        self._num_tokens = 0
        self._previous: Step | None = None
        self._latest: PipelineStats | None = None
        self._latest_steps = 0
        self._due = 0.0

    def add(self, step: Step) -> None:
        """Add a step; prefills and loops add only tokens, and all figures are of one depth."""
        record = step.record
        rows = record.launch.plan.rows
        self._num_tokens += record.tokens
        previous, self._previous = self._previous, step
        if previous is not None and previous.record.launch.depth != record.launch.depth:
            self._ring.clear()
            return
        if previous is None or not (_is_decode(previous) and _is_decode(step)):
            return
        self._ring.append((step_parts(previous, step), (len(rows), record.zombies)))
        self._num_steps += 1

    def latest(self, now: float, *, fresh: bool) -> PipelineStats | None:
        """Return the snapshot, renewed if `_INTERVAL` old or `fresh`; `now` is in seconds."""
        if self._num_steps != self._latest_steps and (fresh or now >= self._due):
            self._latest = self.snapshot()
            self._latest_steps = self._num_steps
            self._due = now + _INTERVAL
        return self._latest

    def snapshot(self) -> PipelineStats | None:
        """Return medians over the window.

        Both gains take off what zombies cost: a step of zombies alone its whole time, one beside
        other rows what a row adds to a forward pass. The predicted gain is of medians; the observed
        one is of the time that all steps of the window took, stalls included.
        """
        if not self._ring:
            return None
        parts, counts = zip(*self._ring, strict=True)
        times = np.array(parts)
        columns = np.array(counts)
        rows, zombies = map(int, columns.sum(axis=0))
        period, forward, sampling, bookkeeping, wait, idle, blocking, mask = (
            float(ns) / _NS_PER_MS for ns in np.median(times, axis=0)
        )
        waste = _zombie_ns(times, columns[:, 0], columns[:, 1])
        total, wasted = StepParts(*times.sum(axis=0)), StepParts(*waste.sum(axis=0))
        tax = float(wasted.period / total.period)
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
            zombie_ratio=zombies / rows,
            predicted_gain=predicted_speedup(blocking, period, tax) - 1.0,
            observed_gain=float((total.blocking - wasted.blocking) / total.period) - 1.0,
            mask_ms=mask,
        )


def _zombie_ns(times: Table, rows: Column, zombies: Column) -> Table:
    """Return the part of each step's times that a loop without zombies would not have."""
    forward = times[:, StepParts._fields.index("forward")]
    spread = rows - rows.mean()
    slope = float(spread @ forward) / max(1.0, float(spread @ spread))  # 0 where all are alike
    a_row = np.clip(slope, 0.0, forward / rows)
    beside = np.minimum(zombies * a_row, forward)
    return np.where((zombies == rows)[:, None], times, beside[:, None])


def _is_decode(step: Step) -> bool:
    """Return whether a launch is a single decode step; a loop has no pipeline to describe."""
    plan = step.record.launch.plan
    return plan.kind is LaunchKind.DECODE and not plan.is_loop


# ---------------------------------------------------------------- step totals

_NS = 1e-9


class _Histogram:
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
    """Counts of steps and tokens; `add` is a `timeline.StepListener`.

    The time between two tokens of a request is the time between the commits of two decodes,
    including prefills of other requests in between; after a pause of the engine it starts with the
    prefill. Tokens of one block share it.
    """

    def __init__(self) -> None:
        self._launches: collections.Counter[str] = collections.Counter()
        self._blocks: collections.Counter[int] = collections.Counter()
        self._step_times = _Histogram()
        self._token_gaps = _Histogram()
        self._tokens = self._forced = self._drafted = self._accepted = 0
        self._decode_ns = self._idle_ns = 0
        self._previous: Step | None = None
        self._tokens_at = 0  # the commit from which the next token's time counts, in nanoseconds

    def add(self, step: Step) -> None:
        record, plan = step.record, step.record.launch.plan
        previous, self._previous = self._previous, step
        self._launches[plan.kind.value] += 1
        self._tokens += record.tokens
        self._forced += record.forced
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
        num_steps = step.record.num_steps_read or 1
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
            forced=self._forced,
            blocks=dict(self._blocks),
        )


# ---------------------------------------------------------------- timeline stream

PERIOD = 0.05
"""Seconds of launches in a `TimelineBatch`."""

_PERIOD_NS = round(PERIOD * 1e9)


class TimelineStream:
    """Sends steps to the processes that watch; while none does, a step costs one test.

    `add` is a `timeline.StepListener`.
    """

    def __init__(self, watchers: ServiceConnections, stats: StepStats) -> None:
        self._watchers = watchers
        self._stats = stats
        self._maker = SpanMaker()
        self._spans: list[LaunchSpan] = []
        self._depth = 0
        self._started = time.perf_counter_ns()
        self._sent_at = 0  # the commit of the last step in a batch, in nanoseconds

    @property
    def watched(self) -> bool:
        return self._watchers.watched

    def add(self, step: Step) -> None:
        if not self._watchers.watched:
            return
        self._depth = step.record.launch.depth
        self.add_spans(self._maker.spans(step), step.record.commit_end)

    def add_spans(self, spans: Sequence[LaunchSpan], commit_end: int) -> None:
        """Add the spans of the next launch, with the time of its commit."""
        self._spans += spans
        if commit_end - self._sent_at >= _PERIOD_NS:
            self._sent_at = commit_end
            self.flush()

    def flush(self) -> None:
        if self._spans:
            spans, self._spans = self._spans, []
            self._watchers.send_timeline(
                TimelineBatch(
                    spans=tuple(spans),
                    decode_steps=self._stats.snapshot(),
                    started=self._started,
                    pipeline_depth=self._depth,
                )
            )
