"""What became of the pictures."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from typing import Any

from legato_client.load.histogram import Histogram

_RATE_SECONDS = 2.0
_COUNTED = (
    *("taken", "sent", "replaced", "refused", "unreadable", "answered", "failed_tasks"),
    *("lost", "resent", "reconnects", "source_reconnects"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Totals:
    """Numbers so far.

    `taken` + `resent` is `sent` + `replaced` + `refused` + `unreadable` + those that wait; `sent`
    is `answered` + the sum of `dropped` + `lost` + `resent` + those under way. Ages are in seconds
    from the picture's capture to the arrival of its last result.
    """

    taken: int
    sent: int
    replaced: int
    refused: int
    unreadable: int
    answered: int
    failed_tasks: int
    dropped: dict[str, int]
    lost: int
    resent: int
    reconnects: int
    source_reconnects: int
    age_p50: float | None
    age_p95: float | None
    seconds: float

    def document(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Figures:
    """Counts, for any thread.

    `replaced` pictures gave way to a newer one before they were sent, `refused` ones met the end of
    a session. `lost` ones were sent to a session that ended without their outcome;
    so were `resent` ones, which then wait again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begin = time.monotonic()
        self._counts: collections.Counter[str] = collections.Counter()
        self._dropped: collections.Counter[str] = collections.Counter()
        self._ages = Histogram()
        self._recent: dict[str, collections.deque[float]] = {
            name: collections.deque(maxlen=1000) for name in ("taken", "answered")
        }
        self.last_age: float | None = None
        self.server = "connecting"
        """The state of the connection, for people."""
        self.source = "opening"

    def count(self, name: str, number: int = 1) -> None:
        """Add to one of the fields of `Totals`."""
        with self._lock:
            self._counts[name] += number
            if name in self._recent:
                self._recent[name].append(time.monotonic())

    def dropped(self, reason: str) -> None:
        with self._lock:
            self._dropped[reason] += 1

    def answered(self, age: float, failed_tasks: int) -> None:
        """A picture has all its results."""
        self.count("answered")
        with self._lock:
            self._ages.add(age)
            self._counts["failed_tasks"] += failed_tasks
            self.last_age = age

    def rate(self, name: str) -> float:
        """Of the last two seconds, in 1/s: "taken" or "answered"."""
        after = time.monotonic() - _RATE_SECONDS
        with self._lock:
            return sum(each > after for each in self._recent[name]) / _RATE_SECONDS

    def totals(self) -> Totals:
        with self._lock:
            known = self._ages.count > 0
            return Totals(
                **{name: self._counts[name] for name in _COUNTED},
                dropped=dict(self._dropped),
                age_p50=self._ages.percentile(50) if known else None,
                age_p95=self._ages.percentile(95) if known else None,
                seconds=time.monotonic() - self._begin,
            )


def summary(totals: Totals) -> list[str]:
    """Lines for people."""
    before = [
        f"{number} {words}"
        for number, words in (
            (totals.replaced, "gave way to a newer one"),
            (totals.refused, "met the end of a session"),
            (totals.unreadable, "could not be read"),
        )
        if number
    ]
    after = [f"{number} dropped as {reason}" for reason, number in sorted(totals.dropped.items())]
    after += [f"{totals.lost} lost with a session"] if totals.lost else []
    after += [f"{totals.resent} sent again"] if totals.resent else []
    after += [f"{totals.failed_tasks} tasks failed"] if totals.failed_tasks else []
    lines = [
        ", ".join([f"{totals.taken} frames in {totals.seconds:.1f} s, {totals.sent} sent", *before])
    ]
    lines.append(", ".join([f"{totals.answered} answered", *after]))
    if totals.age_p50 is not None and totals.age_p95 is not None:
        lines.append(
            f"age of results: half within {totals.age_p50 * 1e3:.0f} ms, "
            f"95 % within {totals.age_p95 * 1e3:.0f} ms"
        )
    if totals.reconnects or totals.source_reconnects:
        lines.append(
            f"reconnected {totals.reconnects} times to the server, "
            f"{totals.source_reconnects} times to the source"
        )
    return lines
