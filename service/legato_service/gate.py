"""Who is inside: the requests in flight, and whether more may come in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from legato_engine.errors import Draining

from legato_service.errors import DuplicateRequest


class Gate:
    """Counts requests in, until it is closed for good."""

    def __init__(self) -> None:
        self._inside: set[str] = set()
        self._open = True
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._inside)

    @property
    def closed(self) -> bool:
        """Whether new requests are refused."""
        return not self._open

    @contextmanager
    def hold(self, request_id: str) -> Iterator[None]:
        """Be inside for the length of the block. Raises `Draining` or `DuplicateRequest`."""
        if not self._open:
            raise Draining("the server is shutting down")
        if request_id in self._inside:
            raise DuplicateRequest("a request of this id is in flight", resource=request_id)
        self._inside.add(request_id)
        self._empty.clear()
        try:
            yield
        finally:
            self._inside.remove(request_id)
            if not self._inside:
                self._empty.set()

    def close(self) -> None:
        """Refuse everybody from now on; those inside stay."""
        self._open = False

    async def wait_empty(self) -> None:
        """Until the last one inside has left."""
        await self._empty.wait()
