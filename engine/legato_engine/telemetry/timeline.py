"""Timeline of the last launches, for Perfetto and chrome://tracing."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from legato_engine.ipc.messages import TimelineSpan
from legato_engine.scheduler.batch import Launch, LaunchKind, StepRecord
from legato_engine.scheduler.interfaces import LaunchTimes

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

TraceEvent = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A committed launch."""

    record: StepRecord
    times: LaunchTimes


StepListener = Callable[[Step], None]
"""Receives all steps in the order of their commits, on the scheduler's thread; must be fast."""


class StepFeed:
    """Observer that reads a launch's device times once for all listeners.

    `committed` runs on the scheduler's thread while the runner has the launch's times.
    """

    def __init__(
        self, times: Callable[[Launch], LaunchTimes], listeners: Sequence[StepListener]
    ) -> None:
        self._times = times
        self._listeners = tuple(listeners)

    def committed(self, record: StepRecord) -> None:
        step = Step(record, self._times(record.launch))
        for listener in self._listeners:
            listener(step)


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

    def spans(self, step: Step) -> list[TimelineSpan]:
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
        parts = (
            ("cpu plan", "plan", record.plan_start, record.plan_end),
            ("cpu launch", "launch", record.plan_end, record.launch_end),
            ("cpu finalize", "finalize", record.sample_start, record.sample_end),
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
            TimelineSpan(lane, name, start, end - start, *common)
            for lane, name, start, end in parts
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


def _events(span: TimelineSpan) -> list[TraceEvent]:
    events: list[TraceEvent] = [
        {
            "ph": "X",
            "pid": 1,
            "tid": LANES.index(span.lane),
            "name": f"{span.name} {span.launch}",
            "cat": span.kind,
            "ts": span.start / 1000,
            "dur": span.duration / 1000,
            "args": {
                "launch": span.launch,
                "kind": span.kind,
                "rows": span.rows,
                "riding": span.riding,
                "zombies": span.zombies,
            },
        }
    ]
    phase = _ARROW.get((span.lane, span.name))
    if phase is not None:
        events.append(
            {
                "ph": phase,
                "bp": "e",
                "pid": 1,
                "tid": LANES.index(span.lane),
                "name": "launch",
                "cat": "launch",
                "id": span.launch,
                "ts": span.start / 1000,
            }
        )
    return events
