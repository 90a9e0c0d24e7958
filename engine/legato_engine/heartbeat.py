"""A thread that tells the service that the engine lives, and ends the engine with its service."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from legato_engine.messages import Heartbeat, Load
from legato_engine.transport import ReportSender

_NOTICE = 0.01  # seconds that a busy main thread has to renew a beat before it leaves


class Vitals:
    """Written by the main thread, read by the heartbeat; each field is replaced, never changed.

    `due` is set shortly before every beat: a busy main thread renews `beat` only then, so that a
    tick pays for no beat that nobody sends.
    """

    __slots__ = ("beat", "due")

    def __init__(self) -> None:
        self.beat = Heartbeat(step=0, load=Load(), estimated_wait=0.0)
        self.due = False


class HeartbeatThread:
    """Beats every `interval` seconds until `stop`; calls `orphaned` when the parent is gone."""

    def __init__(
        self,
        endpoint: str,
        vitals: Vitals,
        *,
        interval: float,
        parent: int,
        orphaned: Callable[[], None],
    ) -> None:
        self._endpoint = endpoint
        self._vitals = vitals
        self._interval = interval
        self._parent = parent
        self._orphaned = orphaned
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="legato-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Beat no more."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        sender = ReportSender(self._endpoint)
        notice = min(_NOTICE, self._interval / 2)
        while True:
            if os.getppid() != self._parent:
                self._orphaned()
            sender.send(self._vitals.beat)
            if self._stopped.wait(self._interval - notice):
                break
            self._vitals.due = True
            if self._stopped.wait(notice):
                break
        sender.close(linger_ms=0)
