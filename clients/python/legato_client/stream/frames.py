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
from legato_client._session.state import age_limit_problem
from legato_client.load.report import DurationHistogram

if TYPE_CHECKING:
    from PIL import Image

_MIN_DELAY_S = 0.2
_MAX_DELAY_S = 5.0
_MAX_START_DELAY_S = 0.5
_JITTER = 0.2  # fraction of a delay, so that clients of one server do not reconnect together


class Backoff:
    """Delays that double until a `note_success`: up to 5 s, or 0.5 s while a peer `is_starting`.

    Attempts that reach no peer continue for `patience` seconds; None: for ever. A reached peer
    may still fail at once each time, so it does not shorten the delays.
    """

    def __init__(self, patience: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._delay = _MIN_DELAY_S
        self._failing_since: float | None = None

    def note_reached(self) -> None:
        self._failing_since = None

    def note_success(self) -> None:
        self._delay = _MIN_DELAY_S
        self._failing_since = None

    def next_delay(self, at_least: float = 0.0, *, is_starting: bool = False) -> float | None:
        """Return the seconds until the next attempt, at least `at_least`; None: give up.

        Patience counts from the first failure since something was reached.
        """
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        longest = _MAX_START_DELAY_S if is_starting else _MAX_DELAY_S
        self._delay = min(self._delay, longest)
        delay = self._delay * random.uniform(1 - _JITTER, 1 + _JITTER)
        self._delay = min(2 * self._delay, longest)
        delay = max(delay, at_least)
        if self._patience is not None and now + delay > self._failing_since + self._patience:
            return None
        return delay


_RATE_SECONDS = 2.0


@dataclasses.dataclass(slots=True)
class Totals:
    """Frame counts so far.

    `taken` + `resent` is `sent` + `replaced` + `refused` + `unreadable` + waiting ones; `sent`
    is `answered` + the sum of `dropped` + `lost` + `resent` + those in flight. Ages are in seconds
    from the frame's capture to the arrival of its last result; `response_time` is from sending, and
    measured if frames are too old in a row.
    """

    taken: int = 0
    sent: int = 0
    replaced: int = 0
    refused: int = 0
    unreadable: int = 0
    answered: int = 0
    failed_tasks: int = 0
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    lost: int = 0
    resent: int = 0
    reconnects: int = 0
    source_reconnects: int = 0
    age_p50: float | None = None
    age_p95: float | None = None
    seconds: float = 0.0
    response_time: float | None = None
    max_age: float | None = None

    @property
    def age_limit_problem(self) -> str:
        """Return why most frames are too old, or an empty text if most are not."""
        too_old = self.dropped.get("too_old", 0)
        if self.max_age is None:
            return ""
        return age_limit_problem(too_old, self.answered, self.max_age, self.response_time)

    def document(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class FrameCounters:
    """Frame counters; thread-safe.

    `replaced` frames were superseded by a newer one before they were sent, `refused` ones came
    as a session ended. `lost` ones were sent to a session that ended without their outcome;
    so were `resent` ones, which then wait again. `max_age` is the age limit in seconds, and
    `on_server` is called at each change of the server's state.
    """

    def __init__(
        self,
        max_age: float | None = None,
        on_server: Callable[[str], None] = lambda state: None,
    ) -> None:
        self._lock = threading.Lock()
        self._begin = time.monotonic()
        self._totals = Totals(max_age=max_age)
        self._ages = DurationHistogram()
        self._recent: dict[str, collections.deque[float]] = {
            name: collections.deque(maxlen=1000) for name in ("taken", "answered")
        }
        self.last_age: float | None = None
        self._server = "connecting"
        self._on_server = on_server
        self.source = "opening"
        self.problem = ""
        """Why the newest unreadable frame was, or the newest task that failed."""

    @property
    def server(self) -> str:
        return self._server

    @server.setter
    def server(self, state: str) -> None:
        if state != self._server:
            self._server = state
            self._on_server(state)

    def count(self, name: str, number: int = 1) -> None:
        """Add to one of the fields of `Totals`."""
        with self._lock:
            setattr(self._totals, name, getattr(self._totals, name) + number)
            if name in self._recent:
                self._recent[name].append(time.monotonic())

    def count_dropped(self, reason: str, response_time: float | None = None) -> None:
        """Count a drop; `response_time` is the seconds that answers take, if that was measured."""
        with self._lock:
            self._totals.dropped[reason] = self._totals.dropped.get(reason, 0) + 1
            self._totals.response_time = response_time or self._totals.response_time

    def count_answered(self, age: float, failed_tasks: int) -> None:
        self.count("answered")
        with self._lock:
            self._ages.add(age)
            self._totals.failed_tasks += failed_tasks
            self.last_age = age

    def rate(self, name: str) -> float:
        """Return the rate over the last two seconds in 1/s: "taken" or "answered"."""
        after = time.monotonic() - _RATE_SECONDS
        with self._lock:
            return sum(each > after for each in self._recent[name]) / _RATE_SECONDS

    def totals(self) -> Totals:
        with self._lock:
            known = self._ages.count > 0
            return dataclasses.replace(
                self._totals,
                dropped=dict(self._totals.dropped),
                age_p50=self._ages.percentile(50) if known else None,
                age_p95=self._ages.percentile(95) if known else None,
                seconds=time.monotonic() - self._begin,
            )


def summary(totals: Totals) -> list[str]:
    before = [
        f"{number} {words}"
        for number, words in (
            (totals.replaced, "replaced by a newer one before sending"),
            (totals.refused, "not sent at the end of a session"),
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
            f"age of results: p50 {totals.age_p50 * 1e3:.0f} ms, p95 {totals.age_p95 * 1e3:.0f} ms"
        )
    if problem := totals.age_limit_problem:
        lines.append(f"{problem}: raise --max-age")
    if totals.reconnects or totals.source_reconnects:
        lines.append(
            f"reconnected {totals.reconnects} times to the server, "
            f"{totals.source_reconnects} times to the source"
        )
    return lines


_WINDOW_NS = 10_000_000_000


class SourceClock:
    """Mapping of a source's clock to this computer's, by the frame with the least delay.

    Any longer delay, in the network or in decoding, counts as age. The minimum is taken over the
    last 10 to 20 seconds, so that the clocks may drift.
    """

    def __init__(self) -> None:
        self._offset_ns: int | None = None  # minimum of this window
        self._before_ns: int | None = None  # and of the previous one
        self._window_ends_ns = 0

    def captured_ns(self, seconds: float, arrived_ns: int) -> int:
        """Convert `seconds` of the source's clock; the other times count from the Unix epoch."""
        own_ns = round(seconds * 1e9)
        offset_ns = arrived_ns - own_ns
        if arrived_ns >= self._window_ends_ns or self._offset_ns is None:
            self._before_ns, self._offset_ns = self._offset_ns, offset_ns
            self._window_ends_ns = arrived_ns + _WINDOW_NS
        self._offset_ns = min(self._offset_ns, offset_ns)
        before_ns = self._offset_ns if self._before_ns is None else self._before_ns
        return own_ns + min(self._offset_ns, before_ns)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CapturedFrame:
    """Frame of a camera, converted lazily: an overloaded camera drops most frames.

    `number` counts the camera's frames from 0. `time` is in seconds from the first,
    `captured_ns` counts from the Unix epoch. `origin` is the receiver's own data. `read` returns
    the image to send and `image` the one to draw on; both raise OSError or ValueError for data
    that is not an image.
    """

    number: int
    time: float
    captured_ns: int
    read: Callable[[], ImageInput]
    image: Callable[[], Image.Image]
    frame_id: str = ""
    origin: object = None


class Mailbox:
    """Slot for one frame, which a newer one replaces; if `every` frame is required, `put` blocks.

    One thread puts and one takes. A frame held at the close can still be taken.
    """

    def __init__(self, every: bool) -> None:
        self._every = every
        self._changed = threading.Condition()
        self._frame: CapturedFrame | None = None
        self._closed = False

    @property
    def is_done(self) -> bool:
        with self._changed:
            return self._closed and self._frame is None

    def put(self, frame: CapturedFrame) -> int:
        """Put a frame; return how many frames this discards: the older one, or this one."""
        with self._changed:
            if self._every:
                self._changed.wait_for(lambda: self._frame is None or self._closed)
            if self._closed:
                return 1
            replaced = int(self._frame is not None)
            self._frame = frame
            self._changed.notify_all()
            return replaced

    def take(self, should_stop: Callable[[], bool]) -> CapturedFrame | None:
        """Wait for a frame; return None once closed, or if `should_stop` at a `nudge`."""
        with self._changed:
            self._changed.wait_for(lambda: self._frame is not None or self._closed or should_stop())
            if should_stop():
                return None
            frame, self._frame = self._frame, None
            self._changed.notify_all()
            return frame

    def nudge(self) -> None:
        """Let a taking thread check `should_stop` again."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def discard(self) -> int:
        """Close, and return how many frames were held."""
        with self._changed:
            held, self._frame = int(self._frame is not None), None
            self.close()
            return held
