"""SessionService."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, nullcontext

from legato.v1 import session_pb2 as pb
from legato.v1 import session_pb2_grpc
from legato_engine.errors import SessionOutOfOrder

from legato_service.requests.dispatcher import Dispatcher
from legato_service.rpc import call
from legato_service.rpc.call import Context
from legato_service.session.session import SessionDriver, SessionLimits, SessionRegistry


class SessionServicer(session_pb2_grpc.SessionServiceServicer):
    """Handler of SessionService."""

    def __init__(
        self, dispatcher: Dispatcher, registry: SessionRegistry, limits: SessionLimits
    ) -> None:
        self._dispatcher = dispatcher
        self._registry = registry
        self._limits = limits

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> AsyncIterator[pb.SessionResponse]:
        """Run a session, limited only by the client's own deadline."""
        rpc = call.current()
        if rpc.key in self._registry:
            rpc.rename()
        key = rpc.key
        # None without a deadline, despite grpc's annotation.
        left: float | None = context.time_remaining()
        rpc.deadline = None if left is None else time.monotonic() + left
        quota = nullcontext() if rpc.principal is None else rpc.principal.session()
        with self._registry.reserve(key), quota:
            opening = await self._opening(request_iterator)
            session = SessionDriver(
                key.caller_id, opening, self._dispatcher, self._limits, self._registry.totals
            )
            self._registry.add(key, session)
            async with aclosing(session.messages(request_iterator)) as messages:
                async for message in messages:
                    yield message

    async def _opening(self, requests: AsyncIterator[pb.SessionRequest]) -> pb.SessionOpen:
        timeout = self._limits.open_timeout
        try:
            async with asyncio.timeout(timeout):
                first = await anext(requests, None)
        except TimeoutError:
            raise SessionOutOfOrder(f"no `open` within {timeout:g} s", field="open") from None
        if first is None or first.WhichOneof("message") != "open":
            raise SessionOutOfOrder("the first message must be `open`", field="open")
        return first.open
