"""How a node is, as ROS 2 tells it."""

from __future__ import annotations

import enum

from legato_client.live.figures import Figures


class Level(enum.IntEnum):
    """diagnostic_msgs/DiagnosticStatus."""

    OK = 0
    WARN = 1
    ERROR = 2
    STALE = 3


class Health:
    """Judges what happened since the last call of `now`."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._failed = 0

    def now(self, engine: str) -> tuple[Level, str, dict[str, str]]:
        """Level, message and values; `engine` is the server's word for the state of its engine."""
        totals = self._figures.totals()
        failed, self._failed = totals.failed_tasks - self._failed, totals.failed_tasks
        server = self._figures.server
        if server != "connected":
            level, message = Level.ERROR, f"server {server}"
        elif engine in ("lost", "stuck"):
            level, message = Level.ERROR, f"engine {engine}"
        elif self._figures.rate("taken") == 0:
            level, message = Level.WARN, "no images"
        elif failed:
            level, message = Level.WARN, f"{failed} tasks failed"
        elif self._figures.rate("answered") == 0:
            level, message = Level.WARN, "no answers"
        else:
            level, message = Level.OK, "answering"
        age = self._figures.last_age
        values = {
            "server": server,
            "engine": engine,
            "images per second": f"{self._figures.rate('taken'):.1f}",
            "answers per second": f"{self._figures.rate('answered'):.1f}",
            "age": _seconds(age),
            "age p50": _seconds(totals.age_p50),
            "age p95": _seconds(totals.age_p95),
            "images": str(totals.taken),
            "answered": str(totals.answered),
            "replaced by newer ones": str(totals.replaced),
            "met the end of a session": str(totals.refused),
            "unreadable": str(totals.unreadable),
            **{f"dropped {reason}": str(n) for reason, n in sorted(totals.dropped.items())},
            "lost": str(totals.lost),
            "failed tasks": str(totals.failed_tasks),
            "reconnects": str(totals.reconnects),
        }
        return level, message, values


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
