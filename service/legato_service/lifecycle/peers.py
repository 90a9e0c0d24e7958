"""The other processes of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from legato_engine.client.connection import EngineConnection
from legato_engine.core.request_key import RequestKey
from legato_engine.errors import Unavailable

if TYPE_CHECKING:
    from legato_service.metrics.snapshot import Snapshot

_TIMEOUT = 2.0  # seconds for the engine to reply; it stops the requests also later


class Peers(Protocol):
    """The other processes, as one process knows them."""

    @property
    def number(self) -> int:
        """0 for the process that runs the engines and the workers."""
        ...

    def drain(self, grace: float) -> None:
        """Within `grace` seconds, this process included."""
        ...

    async def abort(self, target: RequestKey | None) -> int:
        """Stop the others' requests that match `target`, or all; return how many."""
        ...

    async def gather(self, own: Snapshot) -> Snapshot:
        """Add the others' metrics to this process's own."""
        ...


async def abort_elsewhere(engines: Sequence[EngineConnection], target: RequestKey | None) -> int:
    """Stop other processes' requests through the engines; return how many."""
    return sum(await asyncio.gather(*(_abort_at(each, target) for each in engines)))


async def _abort_at(engine: EngineConnection, target: RequestKey | None) -> int:
    try:
        async with asyncio.timeout(_TIMEOUT):
            return await engine.stop_elsewhere(target)
    except (Unavailable, TimeoutError):
        return 0
