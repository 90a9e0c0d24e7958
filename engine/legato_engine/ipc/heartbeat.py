"""Heartbeat thread, which also ends the engine process when its service is gone."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

from legato_engine.ipc.messages import Heartbeat, SchedulerLoad
from legato_engine.ipc.service_connections import Subscribers

_REFRESH_TIME = 0.01  # seconds before a heartbeat


class Vitals:
    """Next heartbeat, written by the main thread and sent by the heartbeat thread.

    The heartbeat thread sets `due` shortly before it sends; a busy main thread renews `beat` only
    then, so that other steps cost nothing. Fields are replaced, never mutated.
    """

    __slots__ = ("beat", "due")

    def __init__(self) -> None:
        self.beat = Heartbeat(step=0, load=SchedulerLoad(), estimated_wait=0.0)
        self.due = False


class HeartbeatThread:
    """Thread that sends a heartbeat every `interval` seconds and to new connections at once.

    Calls `orphaned` when `parent` is no longer this process's parent.
    """

    def __init__(
        self,
        listener_fd: int,
        vitals: Vitals,
        *,
        interval: float,
        parent: int,
        orphaned: Callable[[], None],
    ) -> None:
        self._subscribers = Subscribers(listener_fd)
        self._vitals = vitals
        self._interval = interval
        self._parent = parent
        self._orphaned = orphaned
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="legato-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        self._subscribers.close()
        os.close(self._stop_fd)

    def _run(self) -> None:
        refresh_time = min(_REFRESH_TIME, self._interval / 2)
        while True:
            if os.getppid() != self._parent:
                self._orphaned()
            self._subscribers.send(self._vitals.beat)
            if self._stops_within(self._interval - refresh_time):
                return
            self._vitals.due = True
            if self._stops_within(refresh_time):
                return

    def _stops_within(self, seconds: float) -> bool:
        until, sources = time.monotonic() + seconds, (self._subscribers.fileno(), self._stop_fd)
        while (left := until - time.monotonic()) > 0:
            readable, _, _ = select.select(sources, (), (), left)
            if self._stop_fd in readable:
                return True
            if readable:
                self._subscribers.send(self._vitals.beat)
        return False
