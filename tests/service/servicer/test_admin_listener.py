"""Listeners of AdminService: the main one, its own, or none."""

import os
import stat
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from legato.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, server_pb2
from legato_service.config import ServiceConfig, check

from tests.service.harness import refusal, running

ASK = admin_pb2.GetLoadRequest()
QUESTION = inference_pb2.QueryRequest(question="How many?")
ADMIN, INFERENCE = "legato.v1.AdminService", "legato.v1.InferenceService"


@pytest.fixture(params=["tcp", "unix"])
def place(request, tmp_path):
    """Return an address for the operator."""
    return "127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path}/admin.sock"


async def listed(channel):
    """Return the services that reflection lists."""
    method = channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = method(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    return {service.name for service in (await call.read()).list_services_response.service}


async def unimplemented(channel):
    """Check that AdminService and its reflection are not on this channel."""
    failed = await refusal(admin_pb2_grpc.AdminServiceStub(channel).GetLoad(ASK))
    return failed.code is grpc.StatusCode.UNIMPLEMENTED and ADMIN not in await listed(channel)


async def test_by_default_it_is_on_the_main_listener():
    """That one is reachable from this machine only; the capability is announced."""
    async with running() as server:
        assert await server.admin.GetLoad(ASK) is not None
        assert {ADMIN, INFERENCE} <= await listed(server.channel)
        info = await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())
        assert "admin" in info.capabilities
        assert server.server.admin_address == f"127.0.0.1:{server.port}"


async def test_its_own_listener_has_it_alone(place):
    """It has admin, health and reflection only; the main listener has no admin."""
    async with running(admin_listen=place) as server:
        assert await unimplemented(server.channel)
        assert (await server.inference.Query(QUESTION)).answer
        info = await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())
        assert "admin" not in info.capabilities
        async with grpc.aio.insecure_channel(server.server.admin_address) as opened:
            channel: Any = opened  # untyped, as in the harness
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            assert (await stub.GetLoad(ASK)).engine_state == "serving"
            health: Any = health_pb2_grpc.HealthStub(channel)
            status = await health.Check(health_pb2.HealthCheckRequest(service=INFERENCE))
            assert status.status == health_pb2.HealthCheckResponse.SERVING
            names = await listed(channel)
            assert ADMIN in names
            assert INFERENCE not in names
            failed = await refusal(channel.unary_unary(f"/{INFERENCE}/Query")(b""))
            assert failed.code is grpc.StatusCode.UNIMPLEMENTED
            failed = await refusal(stub.Abort(admin_pb2.AbortRequest()))
            assert failed.reason == "INVALID_FIELD", "errors are typed here as well"


async def test_a_listener_that_others_reach_has_no_admin():
    """With --insecure and no listener of its own, AdminService is on none."""
    async with running(listen="0.0.0.0:0", insecure=True) as server:
        assert await unimplemented(server.channel)
        assert (await server.inference.Query(QUESTION)).answer
        info = await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())
        assert "admin" not in info.capabilities
        assert server.server.admin_address == ""


async def test_a_listener_of_its_own_serves_beside_an_open_one(place):
    """The operator has AdminService although the main listener is open to all."""
    async with running(listen="0.0.0.0:0", insecure=True, admin_listen=place) as server:
        assert await unimplemented(server.channel)
        async with grpc.aio.insecure_channel(server.server.admin_address) as channel:
            assert (await admin_pb2_grpc.AdminServiceStub(channel).GetLoad(ASK)).engine_step == 0


async def test_the_socket_is_its_owners_alone(tmp_path):
    """No other user can connect, and the umask is unchanged."""
    path = tmp_path / "admin.sock"
    before = os.umask(0o022)
    try:
        async with running(admin_listen=f"unix:{path}"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


async def test_a_taken_admin_address_is_an_error():
    """The server does not start without its admin listener."""
    async with running() as server:
        with pytest.raises(OSError, match="cannot listen"):
            async with running(admin_listen=f"127.0.0.1:{server.port}"):
                pass


@pytest.mark.parametrize(
    ("listen", "admin_listen", "insecure", "accepted"),
    [
        ("127.0.0.1:0", "127.0.0.1:0", False, True),
        ("127.0.0.1:0", "unix:/run/legato.sock", False, True),
        ("127.0.0.1:0", "0.0.0.0:0", False, False),
        ("0.0.0.0:0", "127.0.0.1:0", False, False),
        ("0.0.0.0:0", "127.0.0.1:0", True, True),
        ("127.0.0.1:0", "0.0.0.0:0", True, True),
        ("127.0.0.1:0", "nowhere", True, False),
        ("unix:/run/legato.sock", "", False, False),
    ],
)
def test_an_open_listener_is_asked_for_by_name(listen, admin_listen, insecure, accepted):
    """A listener that other machines reach needs --insecure; every address must be valid."""
    config = ServiceConfig(listen=listen, admin_listen=admin_listen, insecure=insecure)
    if accepted:
        check(config)
    else:
        with pytest.raises(ValueError, match=r"--listen|--admin-listen|--insecure"):
            check(config)
