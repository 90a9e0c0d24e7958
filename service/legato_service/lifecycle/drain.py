"""Draining: open requests may finish within a grace."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress

from legato_engine.errors import Draining

from legato_service.requests.registry import RequestRegistry
from legato_service.session.registry import SessionRegistry

_END_TIME = 0.5  # seconds for open requests to be told that they end
LAST_WRITES = 5.0
"""Seconds for finished responses to be sent after the grace of a drain."""
CUT_WRITES = 1.0
"""Seconds for the statuses of requests that a drain has cut."""


class Drain:
    """A drain of requests and sessions. Belongs to one event loop."""

    def __init__(self, requests: RequestRegistry, sessions: SessionRegistry) -> None:
        self._requests = requests
        self._sessions = sessions
        self._end = math.inf  # in seconds of the loop's clock
        self._timeout: asyncio.Timeout | None = None  # of the running `wait`
        self.begun = asyncio.Event()

    @property
    def time_left(self) -> float:
        """Seconds; infinite before the grace begins."""
        return max(self._end - asyncio.get_running_loop().time(), 0.0)

    def begin(self, grace: float) -> None:
        """Refuse new requests and give open ones `grace` seconds; repeated, only shorten that."""
        self._end = min(self._end, asyncio.get_running_loop().time() + grace)
        self._requests.close()
        self._sessions.go_away(self.time_left, Draining("the server is shutting down"))
        self.begun.set()
        if self._timeout is not None:
            self._timeout.reschedule(self._end)

    async def cut(self) -> None:
        """End what is open with `Draining`; return when all has, or after `_END_TIME`."""
        error = Draining("the server is shutting down")
        self._sessions.go_away(0, error)
        self._requests.fail_all(error)
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_TIME):
                await self._requests.wait_empty()
                await self._sessions.wait_empty()
        self._sessions.fail_all(error)  # those whose clients take no results

    async def wait(self) -> bool:
        """Wait for all to end, within the grace; return whether they did. One waiter only."""
        await self.begun.wait()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._end) as self._timeout:
                    await self._sessions.wait_empty()
                    await self._requests.wait_empty()
        finally:
            self._timeout = None
        return len(self._requests) + len(self._sessions) == 0
