"""A thread that tells the service that the engine lives, and ends the engine with its service."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from legato_engine.ipc.messages import Heartbeat, Load
from legato_engine.ipc.subscribers import Subscribers, Woken

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
    """Beats every `interval` seconds until `stop`; calls `orphaned` when the parent is gone.

    Whoever knocks at `door`, a listening descriptor, hears a beat at once.
    """

    def __init__(
        self,
        door: int,
        vitals: Vitals,
        *,
        interval: float,
        parent: int,
        orphaned: Callable[[], None],
    ) -> None:
        self._audience = Subscribers(door)
        self._vitals = vitals
        self._interval = interval
        self._parent = parent
        self._orphaned = orphaned
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="legato-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Beat no more."""
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        self._audience.close()
        os.close(self._stop_fd)

    def _run(self) -> None:
        notice = min(_NOTICE, self._interval / 2)
        while True:
            if os.getppid() != self._parent:
                self._orphaned()
            self._audience.send(self._vitals.beat)
            if self._stops_within(self._interval - notice):
                return
            self._vitals.due = True
            if self._stops_within(notice):
                return

    def _stops_within(self, seconds: float) -> bool:
        """Wait; newcomers are told meanwhile."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            match self._audience.wait(self._stop_fd, left):
                case Woken.STOP:
                    return True
                case Woken.NEWCOMER:
                    self._audience.send(self._vitals.beat)
        return False
