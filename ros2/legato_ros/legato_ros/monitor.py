"""What is wrong with a camera's topics, in words that name the cause."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Sequence
from typing import Any

from legato_client import ros2

_SHOWN_S = 10.0  # how long a problem that has passed is still reported
_MAX_SKEW_S = 5.0  # a camera's own delay is less


def stamp_ns(message: Any) -> int:
    """Return a message's stamp in nanoseconds; 0: none was set."""
    return ros2.frame_stamp(message.header, 0).capture_time_ns or 0


def layout(message: Any) -> str:
    """Describe what should stay the same from message to message."""
    if hasattr(message, "format"):
        return str(message.format)
    kind = message.encoding if hasattr(message, "encoding") else message.distortion_model
    return f"{message.width}x{message.height} {kind}".rstrip()


class TopicMonitor:
    """Messages of one topic: when they come, their stamps and their layout. Thread-safe."""

    def __init__(self, topic: str, kind: str) -> None:
        """Watch a topic for messages of `kind`, as "sensor_msgs/msg/Image"."""
        self.topic = topic
        self.kind = kind
        self._lock = threading.Lock()
        self._began = self._arrived = time.monotonic()
        self._layout = ""
        self._last_ns: int | None = None
        self._last_clock_ns = 0
        self._problems: dict[str, tuple[float, str]] = {}
        self.counts: collections.Counter[str] = collections.Counter()

    def note(self, message: Any, now_ns: int, jump: float, *, by_arrival: bool) -> bool:
        """Note a message at `now_ns` of the node's clock; return whether its stamp jumped back.

        A stamp jumps if it leaves the clock by more than `jump` seconds since the message before.
        """
        stamp, found = stamp_ns(message), layout(message)
        with self._lock:
            self._arrived = time.monotonic()
            before, self._layout = self._layout, found
            if before and before != found:
                self._add("layout changes", f"changed from {before} to {found}")
            last_ns, self._last_ns = self._last_ns, stamp
            clock_ns, self._last_clock_ns = now_ns - self._last_clock_ns, now_ns
            if last_ns is None:
                self._check_skew(now_ns - stamp, by_arrival)
                return False
            step_ns = stamp - last_ns
            if abs(step_ns - clock_ns) / 1e9 <= jump:
                self._check_skew(now_ns - stamp, by_arrival)
                return False
            self._add(
                "stamp jumps",
                f"stamps jumped by {step_ns / 1e9:+.1f} s within {clock_ns / 1e9:.1f} s",
            )
            return step_ns < 0

    def note_problem(self, kind: str, text: str) -> None:
        """Note a problem of a message; one of each kind is reported, the last."""
        with self._lock:
            self._add(kind, text)

    def problems(self, silence: float, publishers: Sequence[str]) -> list[str]:
        """Return what is wrong now; `publishers` are the types that are published on the topic."""
        now = time.monotonic()
        with self._lock:
            found = [text for at, text in self._problems.values() if now - at < _SHOWN_S]
            quiet = now - self._arrived
        if quiet > silence:
            found.insert(0, self._reason_for_silence(quiet, publishers))
        return [f"{self.topic}: {each}" for each in found]

    def _reason_for_silence(self, quiet: float, publishers: Sequence[str]) -> str:
        text = f"nothing for {quiet:.1f} s"
        if not publishers:
            return f"{text}: no publisher"
        if self.kind not in publishers:
            return f"{text}: {' and '.join(sorted(set(publishers)))} is published, not {self.kind}"
        return f"{text}, though it has a publisher"

    def _check_skew(self, behind_ns: int, by_arrival: bool) -> None:
        if not by_arrival and not -1 <= behind_ns / 1e9 <= _MAX_SKEW_S:
            side = "behind" if behind_ns > 0 else "ahead of"
            self._add(
                "stamps of another clock",
                f"stamps are {abs(behind_ns) / 1e9:.1f} s {side} this node's clock: set "
                "use_sim_time or by_arrival",
            )

    def _add(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        self._problems[kind] = time.monotonic(), text
