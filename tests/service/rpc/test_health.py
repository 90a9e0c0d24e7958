"""grpc.health.v1, as a load balancer sees it."""

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from legato_engine.client.monitor import EngineState

from tests.service.fakes import FakeEngine
from tests.service.harness import refusal, running

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
INFERENCE = "legato.v1.InferenceService"


async def check(server, service):
    """Return the status of a service."""
    return (await server.health.Check(health_pb2.HealthCheckRequest(service=service))).status


@pytest.mark.parametrize("service", [INFERENCE, "legato.v1.ServerService"])
async def test_readiness_follows_the_engine(service):
    """A service is SERVING if and only if the engine is ready; the process is alive throughout."""
    engine = FakeEngine()
    async with running(engine) as server:
        for state in EngineState:
            engine.become(state)
            expected = SERVING if state is EngineState.READY else NOT_SERVING
            assert await check(server, service) == expected
            assert await check(server, "") == SERVING


async def test_a_service_that_is_not_here_is_not_found():
    """Check says NOT_FOUND, Watch says SERVICE_UNKNOWN."""
    async with running() as server:
        assert (await refusal(check(server, "legato.v1.NobodyService"))).code is (
            grpc.StatusCode.NOT_FOUND
        )
        call = server.health.Watch(health_pb2.HealthCheckRequest(service="nobody"))
        assert (await call.read()).status == UNKNOWN
        call.cancel()


async def test_watch_pushes_every_change():
    """A watcher gets the change when the engine is lost, and when it is back."""
    engine = FakeEngine()
    async with running(engine) as server:
        call = server.health.Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        assert (await call.read()).status == SERVING
        engine.become(EngineState.LOST)
        assert (await call.read()).status == NOT_SERVING
        engine.become(EngineState.STARTING)
        engine.become(EngineState.READY)
        assert (await call.read()).status == SERVING
        call.cancel()


async def test_watches_end_with_the_server():
    """A server that stops waits for no watch: it ends them with OK."""
    async with running() as server:
        call = server.health.Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        assert (await call.read()).status == SERVING
        await server.server.stop()
        while (response := await call.read()) is not grpc.aio.EOF:
            assert response.status == NOT_SERVING
        assert await call.code() is grpc.StatusCode.OK


async def test_all_statuses_are_listed():
    """Of every service, and of the process itself."""
    messages: Any = health_pb2  # whose stubs lack these
    async with running() as server:
        listed = await server.health.List(messages.HealthListRequest())
        assert listed.statuses[""].status == health_pb2.HealthCheckResponse.SERVING
        assert "legato.v1.InferenceService" in listed.statuses
