"""The host's time of events that a device dates by a clock of its own."""

from __future__ import annotations

import math

_PERIOD_NS = 1_000_000_000
_MOST_DRIFT = 1e-4  # of one clock beside the other; 15e-6 was seen


class EventClock:
    """Maps times since an anchor, an event, to the clock of `time.perf_counter_ns`.

    The clocks of device and host drift apart, so two facts keep the times true: no event passes
    before it is recorded, and none after the host has seen it. Where the device waits for the host
    an event passes as soon as it is recorded; where the host waits for the device it sees an event
    at once. A time is wrong by as much as the host is late, at most.
    """

    def __init__(self, anchor_ns: int) -> None:
        self._anchor_ns = anchor_ns
        self._soonest = math.inf  # nanoseconds after which the host saw an event, since the anchor

    def date(self, elapsed_ms: float, recorded_ns: int) -> int:
        """The time of an event so long after the anchor, which was recorded then."""
        host_ns = self._anchor_ns + round(elapsed_ms * 1e6)
        if host_ns < recorded_ns:
            self._anchor_ns += recorded_ns - host_ns
            return recorded_ns
        return host_ns

    def saw(self, host_ns: int, seen_ns: int) -> bool:
        """Note when the host saw an event of this time; True: the event is the anchor from now on.

        The host saw no event earlier than `_soonest` after its time. More than the clocks can have
        drifted means that it was always late, which says nothing.
        """
        self._soonest = min(self._soonest, seen_ns - host_ns)
        if host_ns - self._anchor_ns <= _PERIOD_NS:
            return False
        if self._soonest <= _MOST_DRIFT * (host_ns - self._anchor_ns):
            host_ns += int(self._soonest)
        self._anchor_ns, self._soonest = host_ns, math.inf
        return True
