"""Busy polling: an asyncio loop that does not sleep for a while.

A core that slept for milliseconds has lost most of its next task's data from its caches. Busy
polling avoids that at the price of a core, so it is brief and only for `LatencyPolicy.busy_poll`.
"""

from __future__ import annotations

import asyncio
import time

EXPECTED_REQUEST = 0.002
"""Seconds to poll for a lone request that is announced, or may follow the last result."""

SHORT_REQUEST = 0.025
"""Seconds to poll for the end of a lone request."""


class BusyPoll:
    """Keeps the running loop from sleeping; belongs to that loop."""

    def __init__(self) -> None:
        self._until = 0.0  # monotonic seconds
        self.active = False
        """Whether the loop is kept from sleeping."""

    def extend(self, seconds: float) -> None:
        """Poll until `seconds` from now."""
        self._until = time.monotonic() + seconds
        if not self.active:
            self.active = True
            asyncio.get_running_loop().call_soon(self._poll)

    def end(self) -> None:
        """Let the loop sleep again. Idempotent."""
        self._until = 0.0

    def _poll(self) -> None:
        """Reschedule itself: with a callback due, the loop's selector does not block."""
        self.active = time.monotonic() < self._until
        if self.active:
            asyncio.get_running_loop().call_soon(self._poll)
