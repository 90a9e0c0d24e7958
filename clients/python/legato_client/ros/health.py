"""Health of a node that answers images, as ROS diagnostics tell it."""

from __future__ import annotations

import enum

from legato_client.stream.frames import FrameCounters


class Level(enum.IntEnum):
    """diagnostic_msgs/DiagnosticStatus."""

    OK = 0
    WARN = 1
    ERROR = 2
    STALE = 3


class Health:
    """Health derived from the counters since the last call of `now`."""

    def __init__(self, counters: FrameCounters) -> None:
        self._counters = counters
        self._failed = self._unreadable = 0

    def now(self, engine: str = "") -> tuple[Level, str, dict[str, str]]:
        """Return level, message and values; `engine` is the state that the server reports."""
        totals = self._counters.totals()
        failed, self._failed = totals.failed_tasks - self._failed, totals.failed_tasks
        unreadable, self._unreadable = totals.unreadable - self._unreadable, totals.unreadable
        cause = f": {self._counters.problem}" if self._counters.problem else ""
        server = self._counters.server
        taken, answered = self._counters.rate("taken"), self._counters.rate("answered")
        problems = (
            (server != "connected", Level.ERROR, f"server {server}"),
            (engine in ("lost", "stuck"), Level.ERROR, f"engine {engine}"),
            (taken == 0, Level.WARN, "no images"),
            (failed, Level.WARN, f"{failed} tasks failed{cause}"),
            (unreadable, Level.WARN, f"{unreadable} images cannot be read{cause}"),
            (totals.age_limit_problem, Level.WARN, totals.age_limit_problem),
            (answered == 0, Level.WARN, "no answers"),
            (True, Level.OK, "answering"),
        )
        level, message = next((level, message) for is_so, level, message in problems if is_so)
        values = {
            "server": server,
            **({"engine": engine} if engine else {}),
            "images per second": f"{taken:.1f}",
            "answers per second": f"{answered:.1f}",
            "age": _seconds(self._counters.last_age),
            "age p50": _seconds(totals.age_p50),
            "age p95": _seconds(totals.age_p95),
            "images": str(totals.taken),
            "answered": str(totals.answered),
            "replaced by newer ones": str(totals.replaced),
            "not sent at the end of a session": str(totals.refused),
            "unreadable": str(totals.unreadable),
            **{f"dropped {reason}": str(n) for reason, n in sorted(totals.dropped.items())},
            "lost": str(totals.lost),
            "failed tasks": str(totals.failed_tasks),
            "reconnects": str(totals.reconnects),
        }
        return level, message, values


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
