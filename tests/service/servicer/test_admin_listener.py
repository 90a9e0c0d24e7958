"""Listeners of AdminService: the main one, its own, or none."""

import os
import socket
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


@pytest.fixture
def runtime_folder(tmp_path, monkeypatch):
    """The folder for this user's sockets."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


async def test_by_default_it_is_on_a_socket_of_this_user(runtime_folder):
    """The main listener has it not, although only this machine reaches that."""
    async with running(admin_listen="") as server:
        assert await unimplemented(server.channel)
        info = await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())
        assert "admin" not in info.capabilities
        path = runtime_folder / "legato" / f"admin-{server.port}.sock"
        assert server.server.admin_address == f"unix:{path}"
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with grpc.aio.insecure_channel(server.server.admin_address) as channel:
            assert await admin_pb2_grpc.AdminServiceStub(channel).GetLoad(ASK) is not None
    assert not path.exists(), "a closed listener leaves no socket"


async def test_the_socket_of_a_server_that_died_is_replaced(runtime_folder):
    """Its file is still there, and nothing listens on it."""
    async with running(admin_listen="") as server:
        port, path = server.port, server.server.admin_address.removeprefix("unix:")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)
    async with (
        running(admin_listen="", listen=f"127.0.0.1:{port}") as server,
        grpc.aio.insecure_channel(server.server.admin_address) as channel,
    ):
        assert await admin_pb2_grpc.AdminServiceStub(channel).GetLoad(ASK) is not None


async def test_the_socket_of_a_running_server_is_not_taken(tmp_path):
    """GRPC itself would unlink it."""
    place = f"unix:{tmp_path}/admin.sock"
    async with running(admin_listen=place) as server:
        with pytest.raises(OSError, match="another server"):
            async with running(admin_listen=place):
                pass
        async with grpc.aio.insecure_channel(server.server.admin_address) as channel:
            assert await admin_pb2_grpc.AdminServiceStub(channel).GetLoad(ASK) is not None


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o777])
async def test_a_folder_that_others_can_enter_has_no_socket(runtime_folder, mode):
    """The server serves without AdminService and can say why."""
    folder = runtime_folder / "legato"
    folder.mkdir()
    folder.chmod(mode)
    async with running(admin_listen="") as server:
        assert server.server.admin_address == ""
        assert "others can enter" in server.server.listeners.admin_problem
        assert (await server.inference.Query(QUESTION)).answer


async def test_it_is_on_the_main_listener_if_asked_for():
    """The capability is announced."""
    async with running(admin_listen="same") as server:
        assert await server.admin.GetLoad(ASK) is not None
        assert {ADMIN, INFERENCE} <= await listed(server.channel)
        info = await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())
        assert "admin" in info.capabilities
        assert server.server.admin_address == f"127.0.0.1:{server.port}"


async def test_it_can_be_off():
    """No listener has it."""
    async with running(admin_listen="off") as server:
        assert await unimplemented(server.channel)
        assert server.server.admin_address == ""


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


TLS = {"tls_cert": "cert.pem", "tls_key": "key.pem"}
TOKENS = {"tokens": "tokens.toml"}


@pytest.mark.parametrize(
    ("settings", "accepted"),
    [
        ({"admin_listen": "127.0.0.1:0"}, True),
        ({"admin_listen": "unix:/run/legato.sock"}, True),
        ({"admin_listen": "same"}, True),
        ({"admin_listen": "off"}, True),
        ({"admin_listen": "nowhere", "insecure": True}, False),
        ({"admin_listen": "0.0.0.0:0"}, False),
        ({"admin_listen": "0.0.0.0:0", "insecure": True}, True),
        ({"admin_listen": "0.0.0.0:0", **TLS, **TOKENS}, True),
        ({"listen": "unix:/run/legato.sock"}, False),
        ({"listen": "0.0.0.0:0"}, False),
        ({"listen": "0.0.0.0:0", "insecure": True}, True),
        ({"listen": "0.0.0.0:0", "insecure": True, "admin_listen": "same"}, False),
        ({"listen": "0.0.0.0:0", **TLS}, False),
        ({"listen": "0.0.0.0:0", **TOKENS}, False),
        ({"listen": "0.0.0.0:0", **TOKENS, "insecure": True}, True),
        ({"listen": "0.0.0.0:0", **TLS, **TOKENS}, True),
        ({"listen": "0.0.0.0:0", **TLS, **TOKENS, "admin_listen": "same"}, True),
        ({"listen": "0.0.0.0:0", **TLS, "tls_client_ca": "ca.pem"}, True),
        ({"tls_cert": "cert.pem"}, False),
        ({"tls_key": "key.pem"}, False),
        ({"tls_client_ca": "ca.pem"}, False),
        ({"health_listen": "0.0.0.0:0"}, True),
        ({"health_listen": "nowhere"}, False),
    ],
)
def test_an_unprotected_listener_is_asked_for_by_name(settings, accepted):
    """A listener that other machines reach has TLS and credentials, or needs --insecure."""
    config = ServiceConfig(**{"listen": "127.0.0.1:0", **settings})
    if accepted:
        check(config)
    else:
        with pytest.raises(ValueError, match=r"--[a-z-]+"):
            check(config)
