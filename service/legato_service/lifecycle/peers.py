"""The other processes of a server, to which an operator's orders are passed on."""

from __future__ import annotations

import asyncio
from typing import Protocol

from legato_engine.client.connection import EngineConnection
from legato_engine.core import RequestKey
from legato_engine.errors import Unavailable

_TIMEOUT = 2.0  # seconds for the engine to reply; it stops the requests also later


class Peers(Protocol):
    """The other processes, as one process knows them."""

    @property
    def is_first(self) -> bool:
        """Whether this is the first process, which runs the engine and the workers."""
        ...

    def drain(self, grace: float) -> None:
        """Drain all processes within `grace` seconds, this one included."""
        ...

    async def abort(self, target: RequestKey | None) -> int:
        """Stop the others' requests that match `target`, or all; returns how many."""
        ...


async def abort_elsewhere(engine: EngineConnection, target: RequestKey | None) -> int:
    """Stop other processes' requests through the engine; return how many, 0 without an engine."""
    try:
        async with asyncio.timeout(_TIMEOUT):
            return await engine.stop_elsewhere(target)
    except (Unavailable, TimeoutError):
        return 0
