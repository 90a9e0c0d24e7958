"""TLS: certificates of the server and its clients, and their rotation."""

from __future__ import annotations

import asyncio
import ssl
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import structlog
from cryptography.hazmat.primitives import serialization
from legato.v1 import inference_pb2, inference_pb2_grpc
from legato_service.access.credentials import Credentials, FileRejected, parse
from legato_service.access.principal import Quotas
from legato_service.access.tls import ServerCertificate

from tests.service.access.credentials import (
    HOST,
    Authority,
    Files,
    Pair,
    Token,
    call_empty,
    channel,
    replace,
    write,
)
from tests.service.harness import Running, running, until

QUESTION = inference_pb2.QueryRequest(question="How many?")
INTERVAL = 0.01  # between two looks at the files
INFO = "/legato.v1.ServerService/GetServerInfo"


@pytest.fixture(scope="module")
def authority():
    return Authority()


@pytest.fixture(scope="module")
def stranger():
    """An authority that the server does not trust."""
    return Authority()


@asynccontextmanager
async def secured(files: Files, **settings: Any) -> AsyncIterator[Running]:
    """A server with these files; it reads changes at once."""
    settings = {**files.settings, **settings, "access_interval": INTERVAL}
    async with running(**settings) as server:
        yield server


async def answers(opened: grpc.aio.Channel) -> bool:
    """Whether a question is answered."""
    stub: Any = inference_pb2_grpc.InferenceServiceStub(opened)
    try:
        return bool((await stub.Query(QUESTION, timeout=10)).answer)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return False


async def connects(port: int, root: bytes, client: Pair | None = None) -> bool:
    """Whether a new connection is answered."""
    async with channel(port, root, client) as opened:
        return await answers(opened)


async def test_a_server_with_a_certificate_speaks_tls_only(tmp_path, authority, stranger):
    """To those that trust it."""
    async with secured(Files(tmp_path, authority.server())) as server:
        assert await connects(server.port, authority.pem)
        assert not await connects(server.port, stranger.pem)
        assert not await answers(server.channel), "plain text"


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        (ssl.TLSVersion.TLSv1_1, False),
        (ssl.TLSVersion.TLSv1_2, True),
        (ssl.TLSVersion.TLSv1_3, True),
    ],
)
async def test_old_versions_of_tls_are_refused(tmp_path, authority, version, accepted):
    """From TLS 1.2 on."""
    context = ssl.create_default_context(cadata=authority.pem.decode())
    context.set_alpn_protocols(["h2"])
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        context.minimum_version = context.maximum_version = version
    async with secured(Files(tmp_path, authority.server())) as server:
        try:
            _, writer = await asyncio.open_connection(HOST, server.port, ssl=context)
        except (ssl.SSLError, ConnectionError):
            assert not accepted
        else:
            assert accepted
            writer.close()


async def test_a_client_needs_a_certificate_of_the_authority(tmp_path, authority, stranger):
    """With --tls-client-ca; the handshake fails otherwise."""
    async with secured(Files(tmp_path, authority.server(), authority.pem)) as server:
        assert await connects(server.port, authority.pem, authority.client("robot.example"))
        assert not await connects(server.port, authority.pem)
        assert not await connects(server.port, authority.pem, stranger.client("robot.example"))


@pytest.mark.parametrize(
    ("names", "common_name", "tenant"),
    [
        (("robot-1.example",), None, "robot-1.example"),
        (("robot-1.example",), "cn", "robot-1.example"),
        ((), "robot-cn", "robot-cn"),
        (("robot-1.example", "robot-2.example"), None, "robot-1.example"),
        (("*.example",), None, "cert:"),
    ],
)
async def test_without_a_file_each_certificate_is_its_own_tenant(
    tmp_path, authority, names, common_name, tenant
):
    """By its DNS name, else its common name; names that are no tenant's are hashed."""
    client = authority.client(*names, common_name=common_name)
    async with secured(Files(tmp_path, authority.server(), authority.pem)) as server:
        assert await connects(server.port, authority.pem, client)
        (request,) = server.engine.requests
        assert request.request_id.tenant.startswith(tenant)
        async with channel(server.port, authority.pem, client) as opened:
            failed = await call_empty(opened, "/legato.v1.AdminService/GetLoad", ())
            assert failed.reason == "FORBIDDEN", "no certificate is the operator's by itself"


async def test_a_file_maps_certificates_to_tenants(tmp_path, authority):
    """With a file, others are refused; a token has precedence over the certificate."""
    mapped = Token("cert", ["infer"], tenant="from-file", san='["robot.example"]')
    token = Token("token", ["infer", "admin"], tenant="from-token")
    tokens = write(tmp_path / "tokens.toml", mapped, token)
    files = Files(tmp_path, authority.server(), authority.pem)
    async with secured(files, tokens=tokens) as server:
        async with channel(server.port, authority.pem, authority.client("robot.example")) as known:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(known)
            await stub.Query(QUESTION)
            await stub.Query(QUESTION, metadata=token.metadata)
            refused = await call_empty(known, INFO, (("authorization", "Bearer x"),))
            assert refused.reason == "UNAUTHENTICATED", "no second try with the certificate"
        tenants = [request.request_id.tenant for request in server.engine.requests]
        assert tenants == ["from-file", "from-token"]
        async with channel(server.port, authority.pem, authority.client("b.example")) as unknown:
            assert (await call_empty(unknown, INFO, ())).reason == "UNAUTHENTICATED"


def test_a_uri_names_a_client():
    """As SPIFFE has it, and before DNS names."""
    uri = "spiffe://plant.example/robot/7"
    records = parse(
        f'[[credential]]\nid = "a"\ntenant = "by-uri"\nscopes = ["infer"]\nsan = "{uri}"\n'
        '[[credential]]\nid = "b"\ntenant = "by-dns"\nscopes = ["infer"]\nsan = "r.example"\n'
        '[[credential]]\nid = "c"\ntenant = "by-cn"\nscopes = ["infer"]\nsan = "cn"\n'.encode()
    )
    known = Credentials(Quotas(), 1, records)
    dns = {"peer_dns": [b"r.example"], "x509_common_name": [b"cn"]}

    def tenant(peer: dict[str, list[bytes]]) -> str:
        principal = known.of_certificate(peer)
        return principal.tenant if principal else ""

    assert tenant({"peer_uri": [uri.encode()], **dns}) == "by-uri"
    assert tenant(dns) == "by-dns"
    assert tenant({"x509_common_name": [b"cn"]}) == "by-cn"
    spoofed = {"peer_dns": [b"other.example"], "x509_common_name": [b"cn"]}
    assert not tenant(spoofed), "a common name beside other names is no name"


async def test_a_new_certificate_is_used_for_new_connections(tmp_path, authority, stranger):
    """Open connections stay."""
    files = Files(tmp_path, authority.server())
    async with secured(files) as server, channel(server.port, authority.pem) as old:
        assert await answers(old)
        files.write(stranger.server())
        await until_connects(server.port, stranger.pem)
        assert not await connects(server.port, authority.pem)
        assert await answers(old)


async def until_connects(port: int, root: bytes, client: Pair | None = None) -> None:
    """The test's own timeout bounds it."""
    while not await connects(port, root, client):
        pass


async def test_a_new_authority_of_clients_is_used(tmp_path, authority, stranger):
    """Certificates of the old one are refused from then on."""
    files = Files(tmp_path, authority.server(), authority.pem)
    old, new = authority.client("a.example"), stranger.client("b.example")
    async with secured(files) as server:
        assert await connects(server.port, authority.pem, old)
        replace(files.ca, stranger.pem)
        await until_connects(server.port, authority.pem, new)
        assert not await connects(server.port, authority.pem, old)


@pytest.mark.parametrize("broken", ["mismatched", "empty", "garbage", "missing"])
async def test_a_broken_certificate_leaves_the_old_one(tmp_path, authority, broken):
    """It is logged once and counted; a good one is used afterwards."""
    pair = authority.server()
    files = Files(tmp_path, pair)
    with structlog.testing.capture_logs() as logs:
        async with secured(files) as server:
            certificate = server.server.listeners.certificate
            assert certificate is not None
            if broken == "missing":
                files.key.unlink()
            else:
                bad = {"mismatched": authority.server().key, "empty": b"", "garbage": b"x"}
                replace(files.key, bad[broken])
            await until(lambda: certificate.num_failed_reloads == 1)
            assert await connects(server.port, authority.pem)
            for _ in range(10):
                certificate.reload_changed()
            assert certificate.num_failed_reloads == 1
            replace(files.key, pair.key)
            await until(lambda: any(line["event"] == "tls_reloaded" for line in logs))
            assert await connects(server.port, authority.pem)
    (failure,) = [line for line in logs if line["event"] == "tls_reload_failed"]
    assert failure["error"]
    assert b"PRIVATE" in pair.key
    assert not any("PRIVATE KEY" in str(line) for line in logs)


def test_an_encrypted_key_is_refused(tmp_path, authority):
    """Nothing asks for a password."""
    pair = authority.server()
    key = serialization.load_pem_private_key(pair.key, None)
    files = Files(tmp_path, pair)
    replace(
        files.key,
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"password"),
        ),
    )
    with pytest.raises(FileRejected):
        ServerCertificate(str(files.cert), str(files.key))


async def test_a_server_does_not_start_with_files_that_do_not_fit(tmp_path, authority):
    files = Files(tmp_path, Pair(authority.server().chain, authority.server().key))
    with pytest.raises(FileRejected, match="MISMATCH"):
        async with secured(files):
            pass


async def test_a_tcp_listener_of_the_operator_has_tls(tmp_path, authority):
    """A unix socket has not."""
    admin = Token("admin", ["admin"])
    tokens = write(tmp_path / "tokens.toml", admin)
    files = Files(tmp_path, authority.server())
    async with secured(files, tokens=tokens, admin_listen="127.0.0.1:0") as server:
        port = int(server.server.listeners.admin_address.rpartition(":")[2])
        async with channel(port, authority.pem) as opened:
            path = "/legato.v1.AdminService/GetLoad"
            assert await call_empty(opened, path, admin.metadata) is None
            assert (await call_empty(opened, path, ())).reason == "UNAUTHENTICATED"
    place = f"unix:{tmp_path}/a.sock"
    async with (
        secured(files, tokens=tokens, admin_listen=place),
        grpc.aio.insecure_channel(place) as opened,
    ):
        assert await call_empty(opened, "/legato.v1.AdminService/GetLoad", ()) is None


def test_a_key_that_others_read_is_warned_of(tmp_path, authority):
    files = Files(tmp_path, authority.server())
    files.key.chmod(0o644)
    with structlog.testing.capture_logs() as logs:
        ServerCertificate(str(files.cert), str(files.key))
    assert [line["event"] for line in logs] == ["tls_key_exposed"]
