"""The processes of one server, as an operator's orders concern them all."""

from __future__ import annotations

import asyncio
from typing import Protocol

from legato_engine.client.connection import EngineConnection
from legato_engine.core import RequestKey
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

    async def abort(self, target: RequestKey | None) -> int:
        """Stop the others' requests that match `target`, or all; returns how many."""
        ...


async def abort_elsewhere(engine: EngineConnection, target: RequestKey | None) -> int:
    """Stop other processes' requests through the engine; none where there is no engine."""
    try:
        async with asyncio.timeout(_PATIENCE):
            return await engine.stop_elsewhere(target)
    except (Unavailable, TimeoutError):
        return 0
