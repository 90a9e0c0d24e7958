"""How long the engine has given no sign of life."""

from __future__ import annotations

import time

from legato_engine.ipc.messages import Heartbeat

TICK = 0.2  # seconds
_LARGEST_GAP = 2 * TICK


class Liveness:
    """Seconds without a heartbeat, and seconds with work and without a step.

    Only the time in which this process runs counts: between two calls of `tick`, which is called
    every `TICK` seconds, `_LARGEST_GAP` at most. So a pause of this process is not taken for one of
    the engine, whose heartbeats of that time are still unread.
    """

    def __init__(self) -> None:
        self._step = 0
        self._ticked_at = time.monotonic()
        self.silent = 0.0
        self.unmoved = 0.0

    def restart(self) -> None:
        """A connection was made, or an engine got ready."""
        self.silent = self.unmoved = 0.0
        self._ticked_at = time.monotonic()

    def tick(self) -> None:
        now = time.monotonic()
        passed = min(now - self._ticked_at, _LARGEST_GAP)
        self._ticked_at = now
        self.silent += passed
        self.unmoved += passed

    def heard(self, beat: Heartbeat, *, has_requests: bool = False) -> None:
        """`has_requests`: this process waits for some, which a hung engine may not have counted.

        Images that are being prepared take no steps, and end by limits of their own.
        """
        self.silent = 0.0
        load = beat.load
        idle = not load.has_steps and (load.preparing > 0 or not has_requests)
        if idle or beat.step != self._step:
            self._step = beat.step
            self.unmoved = 0.0
