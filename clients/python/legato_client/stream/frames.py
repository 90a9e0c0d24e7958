"""Frames between a camera and a session: mailbox, counters, backoff."""

from __future__ import annotations

import collections
import dataclasses
import random
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from legato_client._images.sources import ImageInput
from legato_client.load.report import Histogram

if TYPE_CHECKING:
    from PIL import Image

_FIRST = 0.2  # seconds
_LONGEST = 5.0
_SPREAD = 0.2  # of a delay, so that clients of one server do not come back together


class Backoff:
    """Delays that double up to 5 s until a `success`.

    `patience` is for how many seconds attempts go on that reach nothing; None: for ever. What is
    `reached` may still fail at once each time, so it does not shorten the delays.
    """

    def __init__(self, patience: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._delay = _FIRST
        self._failing_since: float | None = None

    def reached(self) -> None:
        self._failing_since = None

    def success(self) -> None:
        self._delay = _FIRST
        self._failing_since = None

    def failure(self, at_least: float = 0.0) -> float | None:
        """Seconds until the next attempt, at least those that the server asks for; None: no more.

        Patience counts from the first failure since something was reached.
        """
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        delay = self._delay * random.uniform(1 - _SPREAD, 1 + _SPREAD)
        self._delay = min(2 * self._delay, _LONGEST)
        delay = max(delay, at_least)
        if self._patience is not None and now + delay > self._failing_since + self._patience:
            return None
        return delay


# ---------------------------------------------------------------- figures

# What became of the pictures.

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
        """Return the rate over the last two seconds in 1/s: "taken" or "answered"."""
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


# ---------------------------------------------------------------- source clock

# When a picture was taken, by a camera whose clock is another.

_WINDOW_NS = 10_000_000_000


class SourceClock:
    """Maps a source's own times to this computer's, by the picture that arrived the fastest.

    What takes longer than that one, in the network or in decoding, counts as age. The fastest is
    that of the last 10 to 20 seconds, so that clocks may run apart.
    """

    def __init__(self) -> None:
        self._offset_ns: int | None = None  # the least of this window
        self._before_ns: int | None = None  # and of the one before
        self._window_ends_ns = 0

    def captured_ns(self, seconds: float, arrived_ns: int) -> int:
        """`seconds` are of the source's clock, the others count from the Unix epoch."""
        own_ns = round(seconds * 1e9)
        offset_ns = arrived_ns - own_ns
        if arrived_ns >= self._window_ends_ns or self._offset_ns is None:
            self._before_ns, self._offset_ns = self._offset_ns, offset_ns
            self._window_ends_ns = arrived_ns + _WINDOW_NS
        self._offset_ns = min(self._offset_ns, offset_ns)
        before_ns = self._offset_ns if self._before_ns is None else self._before_ns
        return own_ns + min(self._offset_ns, before_ns)


# ---------------------------------------------------------------- shot

# A picture on its way from a camera to the server.


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Shot:
    """A picture that is not converted yet, because most of an overloaded camera never are.

    `number` counts the camera's pictures from 0. `time` is in seconds from the first,
    `captured_ns` counts from the Unix epoch. `origin` is whatever
    its receiver wants to know of it. `read` gives what is sent and `picture` what is drawn
    on; both raise OSError or ValueError for a picture that is none.
    """

    number: int
    time: float
    captured_ns: int
    read: Callable[[], ImageInput]
    picture: Callable[[], Image.Image]
    frame_id: str = ""
    origin: object = None


# ---------------------------------------------------------------- mailbox

# Pictures from the thread that takes them to the thread that sends them.


class Mailbox:
    """Holds one picture. A newer one takes its place, or waits for it where `every` is to be sent.

    One thread puts and one takes. What is held when it closes can still be taken.
    """

    def __init__(self, every: bool) -> None:
        self._every = every
        self._changed = threading.Condition()
        self._shot: Shot | None = None
        self._closed = False

    @property
    def is_done(self) -> bool:
        """Return whether the mailbox is empty and closed."""
        with self._changed:
            return self._closed and self._shot is None

    def put(self, shot: Shot) -> int:
        """Return how many pictures will never be taken because of this: an older one, or this."""
        with self._changed:
            if self._every:
                self._changed.wait_for(lambda: self._shot is None or self._closed)
            if self._closed:
                return 1
            replaced = int(self._shot is not None)
            self._shot = shot
            self._changed.notify_all()
            return replaced

    def take(self, gives_up: Callable[[], bool]) -> Shot | None:
        """Wait for a picture; None once it is closed, or `gives_up` at a `nudge`."""
        with self._changed:
            self._changed.wait_for(lambda: self._shot is not None or self._closed or gives_up())
            if gives_up():
                return None
            shot, self._shot = self._shot, None
            self._changed.notify_all()
            return shot

    def nudge(self) -> None:
        """Let a thread that takes ask again whether it gives up."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def discard(self) -> int:
        """Close, and return how many pictures were held."""
        with self._changed:
            held, self._shot = int(self._shot is not None), None
            self._closed = True
            self._changed.notify_all()
            return held
