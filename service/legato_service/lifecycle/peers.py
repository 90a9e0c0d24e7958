"""The processes of one server, as an operator's orders concern them all."""

from __future__ import annotations

import asyncio
from typing import Protocol

from legato_engine.client.connection import EngineConnection
from legato_engine.errors import Unavailable

_PATIENCE = 2.0  # seconds for an engine to say what it stopped; it stops it later, too


class Peers(Protocol):
    """What a process knows of the others."""

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that runs the engine and the others."""
        ...

    def drain(self, grace: float) -> None:
        """Have every process drain within so many seconds, this one included."""
        ...

    async def abort(self, request_id: str) -> int:
        """Stop what the others have of this id, all when it is empty; how many requests."""
        ...


async def abort_elsewhere(engine: EngineConnection, request_id: str) -> int:
    """Stop other processes' requests through the engine; none where there is no engine."""
    try:
        async with asyncio.timeout(_PATIENCE):
            return await engine.stop_elsewhere(request_id)
    except (Unavailable, TimeoutError):
        return 0
