"""Spans of a timeline in Chrome's trace format, for Perfetto and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from legato_client._values.admin import TimelineSpan

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
"""From the top; lanes of newer servers follow."""

_ARROW = {
    ("cpu launch", "launch"): "s",
    ("device compute", "forward"): "t",
    ("cpu commit", "commit"): "f",
}
"""The spans at which an arrow through a launch starts, passes and ends."""

_SECOND = 1e6  # microseconds
_LAUNCHES = 1 << 40  # more than an engine makes: keeps the arrows of engines apart


def trace(spans: Iterable[TimelineSpan]) -> dict[str, Any]:
    """Return the document that `legato trace` writes; each engine is a process."""
    lanes = {name: number for number, name in enumerate(LANES)}
    engines = {0}
    events = []
    for span in spans:
        engines.add(span.engine)
        lane = lanes.setdefault(span.lane, len(lanes))
        events.append(_complete(span, lane))
        phase = _ARROW.get((span.lane, span.name))
        if phase is not None:
            events.append(_arrow(span, lane, phase))
    named = [
        {"ph": "M", "pid": _pid(engine), "tid": lane, "name": "thread_name", "args": {"name": name}}
        for engine in sorted(engines)
        for name, lane in lanes.items()
    ]
    if len(engines) > 1:
        named += [_process_name(each) for each in sorted(engines)]
    return {"traceEvents": named + events, "displayTimeUnit": "ms"}


def _process_name(engine: int) -> dict[str, Any]:
    name = f"engine-{engine}"
    return {"ph": "M", "pid": _pid(engine), "name": "process_name", "args": {"name": name}}


def _pid(engine: int) -> int:
    return 1 + engine


def _complete(span: TimelineSpan, lane: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": _pid(span.engine),
        "tid": lane,
        "name": f"{span.name} {span.launch}",
        "cat": span.kind,
        "ts": span.start * _SECOND,
        "dur": span.duration * _SECOND,
        "args": {
            "launch": span.launch,
            "kind": span.kind,
            "rows": span.rows,
            "riding": span.riding,
            "zombies": span.zombies,
        },
    }


def _arrow(span: TimelineSpan, lane: int, phase: str) -> dict[str, Any]:
    return {
        "ph": phase,
        "bp": "e",
        "pid": _pid(span.engine),
        "tid": lane,
        "name": "launch",
        "cat": "launch",
        "id": span.launch + span.engine * _LAUNCHES,
        "ts": span.start * _SECOND,
    }
