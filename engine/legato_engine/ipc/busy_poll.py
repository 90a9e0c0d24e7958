"""How long who waits does without sleep, and an event loop that does."""

from __future__ import annotations

import asyncio
import os
import time

EXPECTED = 0.002
"""Seconds for a lone request that is about to come, for both processes, or may come."""

SHORT = 0.025
"""Seconds for the end of one, if it is short."""

_MANY_CORES = 8  # nobody misses one of so many that is awake for a moment


def cores_abound() -> bool:
    """Whether this process may keep a core awake that has nothing to do."""
    return len(os.sched_getaffinity(0)) >= _MANY_CORES


class BusyPoll:
    """Keeps the running loop looking for news, without a sleep between two looks.

    A core that slept for some milliseconds has forgotten most of what its next task needs of its
    caches. This costs a core as long as it lasts, so it is for a moment, and where cores abound.
    """

    def __init__(self) -> None:
        self._until = 0.0  # monotonic seconds
        self.looks = False
        """Whether the loop is kept from sleeping."""

    def stay(self, seconds: float) -> None:
        """So long from now on, at least."""
        self._until = time.monotonic() + seconds
        if not self.looks:
            self.looks = True
            asyncio.get_running_loop().call_soon(self._look)

    def end(self) -> None:
        """The loop may sleep; harmless when it does."""
        self._until = 0.0

    def _look(self) -> None:
        """A callback that is due in the next turn, too; between two turns the loop looks."""
        self.looks = time.monotonic() < self._until
        if self.looks:
            asyncio.get_running_loop().call_soon(self._look)
