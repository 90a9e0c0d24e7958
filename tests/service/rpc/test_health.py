"""grpc.health.v1, as a load balancer sees it."""

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from legato_engine.client.engine_client import EngineState
from legato_engine.ipc.messages import Load
from legato_service.rpc.health import Progress

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
    async with running(engine, health_interval=3600) as server:
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


async def test_a_stuck_engine_is_found_without_a_state_change():
    """Pending work and no step turns NOT_SERVING by itself, and a step turns it back."""
    engine = FakeEngine()
    async with running(engine, stuck_after=0.1) as server:
        call = server.health.Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        assert (await call.read()).status == SERVING
        engine.load = Load(waiting=1)
        assert (await call.read()).status == NOT_SERVING
        engine.load = Load()
        assert (await call.read()).status == SERVING
        call.cancel()


def test_progress_is_idle_or_stepping():
    """Busy without a step for longer than allowed is not ready; full but stepping is."""
    engine = FakeEngine()
    progress = Progress(engine, stuck_after=30, silent_after=1e9)
    base = engine.last_heartbeat
    assert progress.is_ready(base)
    engine.load = Load(running=16, waiting=256)
    assert progress.is_ready(base + 29)
    assert not progress.is_ready(base + 31)
    engine.step = 1
    assert progress.is_ready(base + 31)
    assert progress.is_ready(base + 60)
    assert not progress.is_ready(base + 62)
    engine.load = Load()
    assert progress.is_ready(base + 1000)


def test_a_silent_engine_is_not_ready():
    """An engine without heartbeats is not ready."""
    engine = FakeEngine()
    engine.silent_since = 100.0
    progress = Progress(engine, stuck_after=30, silent_after=5)
    assert progress.is_ready(104.0)
    assert not progress.is_ready(105.0)


async def test_all_statuses_are_listed():
    """Of every service, and of the process itself."""
    messages: Any = health_pb2  # whose stubs lack these
    async with running() as server:
        listed = await server.health.List(messages.HealthListRequest())
        assert listed.statuses[""].status == health_pb2.HealthCheckResponse.SERVING
        assert "legato.v1.InferenceService" in listed.statuses
