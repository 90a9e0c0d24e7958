"""The timeline as it happens, for service processes that watch it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from legato_engine.ipc.messages import TimelineBatch, TimelineSpan
from legato_engine.telemetry.step_stats import StepStats
from legato_engine.telemetry.timeline import SpanMaker, Step

PERIOD = 0.05
"""Seconds of launches in a batch."""

_PERIOD_NS = round(PERIOD * 1e9)


class Watchers(Protocol):
    """The service processes that watch."""

    @property
    def watched(self) -> bool: ...

    def send_timeline(self, batch: TimelineBatch) -> None: ...


class TimelineStream:
    """A `timeline.StepListener`; while no process watches, a step costs one test."""

    def __init__(self, watchers: Watchers, stats: StepStats) -> None:
        self._watchers = watchers
        self._stats = stats
        self._maker = SpanMaker()
        self._spans: list[TimelineSpan] = []
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

    def add_spans(self, spans: Sequence[TimelineSpan], commit_end: int) -> None:
        """Add those of the next launch, which was committed then."""
        self._spans += spans
        if commit_end - self._sent_at >= _PERIOD_NS:
            self._sent_at = commit_end
            self.flush()

    def flush(self) -> None:
        """Send the spans that wait."""
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
