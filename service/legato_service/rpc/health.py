"""grpc.health.v1 that tells the truth: driven by the engine's state and its steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from legato_engine.client.engine_client import EngineState

from legato_service.engine import Engine
from legato_service.rpc.context import Context

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

LIVENESS = ""  # the service that says: this process answers


class Progress:
    """Whether an engine that has work is getting on with it."""

    def __init__(self, engine: Engine, *, stuck_after: float, silent_after: float) -> None:
        self._engine = engine
        self._stuck_after = stuck_after
        self._silent_after = silent_after
        self._step = engine.step
        self._moved = time.monotonic()

    def is_ready(self, now: float) -> bool:
        """Ready, heard from lately, and idle or stepping; `now` is `time.monotonic()` seconds.

        A full queue is still ready: busy and broken are different things.
        """
        load = self._engine.load
        idle = load.running + load.waiting + load.inflight == 0
        if idle or self._engine.step != self._step:
            self._step, self._moved = self._engine.step, now
        heard = now - self._engine.last_heartbeat < self._silent_after
        moving = now - self._moved < self._stuck_after
        return self._engine.state is EngineState.READY and heard and moving


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Check and Watch. Never asks the engine anything, so it answers under any load."""

    def __init__(self, services: Iterable[str], progress: Progress) -> None:
        self._services = tuple(services)
        self._progress = progress
        self._ready = False
        self._shut = False  # for good: the server is going away
        self._closed = False
        self._changed = asyncio.Event()

    async def Check(  # noqa: N802 - named by grpc.health.v1
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """The status now; NOT_FOUND for a service that this server does not have."""
        status = self.status(request.service)
        if status == SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802 - named by grpc.health.v1
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status now and at every change, until the server closes."""
        told: int | None = None
        while not self._closed:
            changed, status = self._changed, self.status(request.service)
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            await changed.wait()

    def status(self, service: str) -> int:
        """The ServingStatus of a service, as of the last `update`."""
        if service == LIVENESS:
            return SERVING
        if service not in self._services:
            return SERVICE_UNKNOWN
        return SERVING if self._ready and not self._shut else NOT_SERVING

    def update(self) -> None:
        """Look at the engine and tell those who watch; cheap, called often."""
        ready = self._progress.is_ready(time.monotonic())
        if ready != self._ready:
            self._ready = ready
            self._tell()

    async def keep_updated(self, interval: float) -> None:
        """Look every `interval` seconds, for ever."""
        while True:
            self.update()
            await asyncio.sleep(interval)

    def withdraw(self) -> None:
        """NOT_SERVING from now on, whatever the engine does."""
        self._shut = True
        self._tell()

    def close(self) -> None:
        """End all watches, so that a server that stops need not wait for them."""
        self._closed = True
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
