"""The results of a load, mergeable over senders."""

from __future__ import annotations

import dataclasses
from collections import Counter

from legato_client.load.histogram import Histogram


@dataclasses.dataclass(slots=True)
class Record:
    """Of all requests that were due within the window of the measurement.

    `latency` runs to the last message and `first` to the first answer in it, both from when the
    request was due (in a closed loop: sent). `gap` is the time between two messages of one stream,
    `lag` how late the load itself sent. `messages` and `completed` count within the window,
    whenever their request was due. `errors` counts by reason.
    """

    latency: Histogram = dataclasses.field(default_factory=Histogram)
    first: Histogram = dataclasses.field(default_factory=Histogram)
    gap: Histogram = dataclasses.field(default_factory=Histogram)
    lag: Histogram = dataclasses.field(default_factory=Histogram)
    due: int = 0
    completed: int = 0
    messages: int = 0
    errors: Counter[str] = dataclasses.field(default_factory=Counter)
    cpu_share: float = 0.0  # of a core, of the busiest sender

    def merge(self, other: Record) -> None:
        for mine, theirs in (
            (self.latency, other.latency),
            (self.first, other.first),
            (self.gap, other.gap),
            (self.lag, other.lag),
        ):
            mine.merge(theirs)
        self.due += other.due
        self.completed += other.completed
        self.messages += other.messages
        self.errors.update(other.errors)
        self.cpu_share = max(self.cpu_share, other.cpu_share)

    def figures(self, seconds: float) -> dict[str, object]:
        """`seconds` is the length of the window; durations become milliseconds."""
        return {
            "seconds": seconds,
            "due": self.due,
            "failed": self.errors.total(),
            "errors": dict(self.errors),
            "requests_per_second": self.completed / seconds,
            "messages_per_second": self.messages / seconds,
            "latency_ms": self.latency.summary_ms(),
            "first_ms": self.first.summary_ms(),
            "gap_ms": self.gap.summary_ms(),
            "lag_ms": self.lag.summary_ms(),
            "sender_cpu_share": self.cpu_share,
        }
