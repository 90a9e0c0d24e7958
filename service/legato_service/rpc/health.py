"""grpc.health.v1, from the engine's state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from legato_engine.client.monitor import EngineState

from legato_service.rpc.call import Context

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

LIVENESS = ""  # SERVING while this process responds


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Never waits for the engine, so it responds under any load.

    A full queue counts as ready: busy is not broken.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = tuple(services)
        self._ready = False
        self._withdrawn = False  # for good: the server shuts down
        self._closed = False
        self._changed = asyncio.Event()

    async def Check(  # noqa: N802 - named by grpc.health.v1
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        status = self.status(request.service)
        if status == SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this server does not have the service")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(  # noqa: N802 - named by grpc.health.v1
        self, request: Any, context: Context
    ) -> Any:  # types-grpcio-health-checking lacks the messages
        statuses = {
            service: health_pb2.HealthCheckResponse(status=self.status(service))
            for service in (LIVENESS, *self._services)
        }
        messages: Any = health_pb2
        return messages.HealthListResponse(statuses=statuses)

    async def Watch(  # noqa: N802 - named by grpc.health.v1
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        sent: int | None = None
        while not self._closed:
            changed, status = self._changed, self.status(request.service)
            if status != sent:
                sent = status
                yield health_pb2.HealthCheckResponse(status=status)
            await changed.wait()

    def status(self, service: str) -> int:
        """Return the status as of the last `update`."""
        if service == LIVENESS:
            return SERVING
        if service not in self._services:
            return SERVICE_UNKNOWN
        return SERVING if self.is_ready else NOT_SERVING

    @property
    def is_ready(self) -> bool:
        return self._ready and not self._withdrawn

    def update(self, state: EngineState) -> None:
        """Call with every new state of the engine."""
        ready = state is EngineState.READY
        if ready != self._ready:
            self._ready = ready
            self._notify()

    def withdraw(self) -> None:
        self._withdrawn = True
        self._notify()

    def close(self) -> None:
        self._closed = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
