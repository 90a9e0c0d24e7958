"""The way out: what runs may finish, for so long."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress

from legato_engine.errors import Draining

from legato_service.requests.registry import RequestRegistry
from legato_service.session.registry import SessionRegistry

LAST_WRITES = 5.0
"""Seconds that finished responses have to be written after the grace of a drain."""


class Drain:
    """Begun once; to begin again only shortens the grace. Belongs to one event loop."""

    def __init__(self, gate: RequestRegistry, sessions: SessionRegistry) -> None:
        self._gate = gate
        self._sessions = sessions
        self._end = math.inf  # of the grace, on the loop's clock
        self._timeout: asyncio.Timeout | None = None  # of the wait under way
        self.begun = asyncio.Event()

    @property
    def time_left(self) -> float:
        """Seconds of the grace, 0 when it is over; infinite before it began."""
        return max(self._end - asyncio.get_running_loop().time(), 0.0)

    def begin(self, grace: float) -> None:
        """Let nobody in any more; those inside have `grace` seconds, or what is left of them."""
        self._end = min(self._end, asyncio.get_running_loop().time() + grace)
        self._gate.close()
        self._sessions.go_away(self.time_left, Draining("the server is shutting down"))
        self.begun.set()
        if self._timeout is not None:
            self._timeout.reschedule(self._end)

    async def wait(self) -> bool:
        """Until all have left or the grace is over; whether all have. One waiter at a time."""
        await self.begun.wait()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._end) as self._timeout:
                    await self._sessions.wait_empty()
                    await self._gate.wait_empty()
        finally:
            self._timeout = None
        return len(self._gate) + len(self._sessions) == 0
