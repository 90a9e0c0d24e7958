"""A timeline of the last launches, for Perfetto and chrome://tracing.

Lanes show the scheduler's thread, the device, and the launch in each slot. Arrows follow a launch
from the host to the device and back.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from legato_engine.scheduler.launch import Launch
from legato_engine.scheduler.runner import LaunchTimes
from legato_engine.scheduler.step_record import StepRecord

LANES = (
    "cpu plan",
    "cpu launch",
    "cpu wait",
    "cpu commit",
    "cpu finalize",
    "device compute",
    "device copy",
    "slot 0",
    "slot 1",
)
TraceEvent = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A committed launch: the host's record and the device's times."""

    record: StepRecord
    times: LaunchTimes


class StepListener(Protocol):
    """A receiver of all steps, in the order of their commits."""

    def add(self, step: Step) -> None:
        """Add a step; runs on the scheduler's thread and must be quick."""
        ...


class StepFeed:
    """A `scheduler.Observer` that reads the device times of a launch once for all listeners."""

    def __init__(
        self, times: Callable[[Launch], LaunchTimes], listeners: Sequence[StepListener]
    ) -> None:
        self._times = times
        self._listeners = tuple(listeners)

    def committed(self, record: StepRecord) -> None:
        """Pass a launch to the listeners."""
        step = Step(record, self._times(record.launch))
        for listener in self._listeners:
            listener.add(step)


class Timeline:
    """A `StepListener` that keeps the last `capacity` launches."""

    def __init__(self, capacity: int) -> None:
        self._steps: collections.deque[Step] = collections.deque(maxlen=capacity)

    @property
    def steps(self) -> list[Step]:
        """The launches kept, oldest first."""
        return list(self._steps)

    def add(self, step: Step) -> None:
        """Add a launch."""
        self._steps.append(step)

    def to_json(self) -> str:
        """Return a Chrome trace."""
        return json.dumps({"traceEvents": trace_events(self.steps), "displayTimeUnit": "ms"})

    def dump(self) -> pathlib.Path:
        """Write the trace to `timeline_path` atomically; return the path."""
        path = timeline_path(os.getpid())
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(self.to_json())
        pathlib.Path(file.name).replace(path)
        return path


def timeline_path(pid: int) -> pathlib.Path:
    """Return the file to which the engine process `pid` writes its timeline."""
    return pathlib.Path(tempfile.gettempdir()) / f"legato-timeline-{pid}.json"


def trace_events(steps: list[Step]) -> list[TraceEvent]:
    """Return events in Chrome's trace format, times in microseconds."""
    events: list[TraceEvent] = [
        {"ph": "M", "pid": 1, "tid": lane, "name": "thread_name", "args": {"name": name}}
        for lane, name in enumerate(LANES)
    ]
    previous_copy_end = 0
    for step in steps:
        events += _spans(step, previous_copy_end)
        events += _arrows(step)
        previous_copy_end = step.times.copy_end
    return events


def _spans(step: Step, previous_copy_end: int) -> list[TraceEvent]:
    record, times = step.record, step.times
    # The copy stream runs in order: a copy starts after its sampling and after the copy before it.
    copy_start = max(times.sample_end, previous_copy_end)
    spans = (
        ("cpu plan", "plan", record.plan_start, record.plan_end),
        ("cpu launch", "launch", record.plan_end, record.launch_end),
        ("cpu finalize", "finalize", record.sample_start, record.sample_end),
        ("cpu wait", "wait", record.wait_start, record.wait_end),
        ("cpu commit", "commit", record.wait_end, record.commit_end),
        ("device compute", "forward", times.forward_start, times.forward_end),
        ("device compute", "sample", times.sample_start, times.sample_end),
        ("device copy", "copy", copy_start, max(copy_start, times.copy_end)),
        (f"slot {record.launch.slot}", "held", record.plan_end, record.commit_end),
    )
    launch = record.launch
    arguments = {
        "launch": launch.launch_id,
        "kind": launch.plan.kind.value,
        "rows": len(launch.plan.rows),
        "riding": launch.plan.num_mixed_decodes,
        "zombies": record.zombies,
    }
    return [
        {
            "ph": "X",
            "pid": 1,
            "tid": LANES.index(lane),
            "name": f"{name} {launch.launch_id}",
            "cat": launch.plan.kind.value,
            "ts": start / 1000,
            "dur": (end - start) / 1000,
            "args": arguments,
        }
        for lane, name, start, end in spans
    ]


def _arrows(step: Step) -> list[TraceEvent]:
    record, times = step.record, step.times
    points = (
        ("s", "cpu launch", record.plan_end),
        ("t", "device compute", times.forward_start),
        ("f", "cpu commit", record.wait_end),
    )
    return [
        {
            "ph": phase,
            "bp": "e",
            "pid": 1,
            "tid": LANES.index(lane),
            "name": "launch",
            "cat": "launch",
            "id": record.launch.launch_id,
            "ts": at / 1000,
        }
        for phase, lane, at in points
    ]
