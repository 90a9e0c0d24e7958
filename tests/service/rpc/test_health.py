"""Health checks and reflection, as load balancers and grpcurl use them."""

from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2 as pb
from legato_engine.client.monitor import EngineState
from legato_service.rpc.reflection import SERVICES

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


# ---------------------------------------------------------------- reflection
# Server reflection, as grpcurl uses it.


async def ask(server, name=SERVICES[0], **request):
    """Send one request to the reflection service."""
    call = server.channel.stream_stream(
        f"/{name}/ServerReflectionInfo",
        pb.ServerReflectionRequest.SerializeToString,
        pb.ServerReflectionResponse.FromString,
    )(iter([pb.ServerReflectionRequest(**request)]))
    return await call.read()


def files_of(response):
    """Return the files of a response by name, the requested one first."""
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(data)
        for data in response.file_descriptor_response.file_descriptor_proto
    ]
    return {file.name: file for file in files}


@pytest.mark.parametrize("name", SERVICES)
async def test_services_are_listed(name):
    """Both versions of reflection list the services that exist, and no others."""
    async with running() as server:
        response = await ask(server, name, list_services="*")
    listed = [service.name for service in response.list_services_response.service]
    assert listed == [
        "grpc.health.v1.Health",
        *SERVICES,
        "inference.GRPCInferenceService",
        "legato.v1.AdminService",
        "legato.v1.ImageService",
        "legato.v1.InferenceService",
        "legato.v1.ServerService",
        "legato.v1.SessionService",
    ]


async def test_comments_are_included():
    """The file that reflection serves for Detect holds Detect's documentation."""
    async with running() as server:
        response = await ask(server, file_containing_symbol="legato.v1.InferenceService.Detect")
    files = files_of(response)
    file = files["legato/v1/inference.proto"]
    (service,) = file.service
    method = [method.name for method in service.method].index("Detect")
    (comment,) = [
        location.leading_comments
        for location in file.source_code_info.location
        if list(location.path) == [6, 0, 2, method]
    ]
    assert "Boxes every instance of an object" in comment


async def test_a_file_comes_with_all_it_imports():
    """A client can build the descriptors from one response."""
    async with running() as server:
        response = await ask(server, file_by_filename="legato/v1/inference.proto")
        again = await ask(server, file_containing_symbol="grpc.health.v1.Health")
    files = files_of(response)
    assert next(iter(files)) == "legato/v1/inference.proto"
    for file in files.values():
        assert set(file.dependency) <= set(files)
    assert [file.package for file in files_of(again).values()] == ["grpc.health.v1"]


async def test_an_unknown_symbol_does_not_end_the_stream():
    """The stream goes on after a request that fails."""
    async with running() as server:
        for request in (
            {"file_containing_symbol": "legato.v1.Nobody"},
            {"file_by_filename": "nobody.proto"},
            {"all_extension_numbers_of_type": "legato.v1.Image"},
        ):
            response = await ask(server, **request)
            assert response.error_response.error_code == 5
            assert response.HasField("original_request")


async def test_every_listed_service_can_be_described():
    """A client that describes what it was listed finds all of it, reflection itself included."""
    async with running() as server:
        response = await ask(server, list_services="*")
        for listed in response.list_services_response.service:
            files = files_of(await ask(server, file_containing_symbol=listed.name))
            package, _, name = listed.name.rpartition(".")
            assert any(
                file.package == package and name in [service.name for service in file.service]
                for file in files.values()
            ), listed.name
            for file in files.values():
                again = await ask(server, file_by_filename=file.name)
                assert not again.HasField("error_response"), file.name
