"""Every method by every kind of credential."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from legato.v1 import server_pb2
from legato_service.access.principal import NEEDS, UNKNOWN_METHOD, Need

from tests.service.access.tokens import Token, bearer, call_empty, methods, write
from tests.service.harness import refusal, running

SCOPES = ("infer", "upload", "admin")
BY_SCOPE = {scope: Token(f"only-{scope}", [scope]) for scope in SCOPES}
ALL = Token("all", SCOPES)
EXPIRED = Token("expired", SCOPES, expires="2020-01-01T00:00:00Z")
ABSENT = Token("absent", SCOPES)
FORGED = Token("all", SCOPES)  # another secret for a known id

REFUSED = {
    "none": (),
    "empty": (("authorization", ""),),
    "no scheme": (("authorization", ALL.text),),
    "basic": (("authorization", f"Basic {ALL.text}"),),
    "no secret": bearer("legato_all_"),
    "a short secret": bearer("legato_all_x"),
    "a longer secret": bearer(ALL.text + "x"),
    "another prefix": bearer(ALL.text.replace("legato_", "other_")),
    "not a token": bearer("x" * 4000),
    "unknown id": ABSENT.metadata,
    "wrong secret": FORGED.metadata,
    "expired": EXPIRED.metadata,
    "twice": ALL.metadata * 2,
    "a wrong one first": FORGED.metadata + ALL.metadata,
    "another header": (("x-authorization", f"Bearer {ALL.text}"),),
    "binary": (("authorization-bin", f"Bearer {ALL.text}".encode()),),
}
OPEN = [path for path, need in NEEDS.items() if need is Need.NOTHING]


@pytest.fixture
def tokens(tmp_path):
    return write(tmp_path / "tokens.toml", *BY_SCOPE.values(), ALL, EXPIRED)


def test_every_method_of_the_contract_has_an_entry():
    """Of all services, and the table has no other."""
    assert set(NEEDS) == {*methods(), UNKNOWN_METHOD}


def test_only_health_is_open():
    """Health, and what the Open Inference Protocol has for it: whether the server serves."""
    kserve = ["ServerLive", "ServerReady"]
    assert set(OPEN) == {
        *(f"/grpc.health.v1.Health/{each}" for each in ("Check", "List", "Watch")),
        *(f"/inference.GRPCInferenceService/{each}" for each in kserve),
    }


@pytest.mark.parametrize("kind", REFUSED)
async def test_a_call_without_a_valid_credential_is_refused(tokens, kind):
    """By every method but health, also by methods that do not exist."""
    async with running(tokens=tokens) as server:
        for path in (*methods(), "/legato.v1.InferenceService/Nothing", "/no.such/Method"):
            failed = await call_empty(server.channel, path, REFUSED[kind])
            if path in OPEN:
                assert failed is None or failed.code is not grpc.StatusCode.UNAUTHENTICATED, path
            else:
                assert failed is not None, path
                assert failed.code is grpc.StatusCode.UNAUTHENTICATED, path
                assert failed.reason == "UNAUTHENTICATED"
        assert not server.engine.requests
        assert not server.engine.holds


async def test_the_refusal_does_not_tell_what_was_wrong(tokens):
    """Unknown id, wrong secret and malformed tokens read the same."""
    async with running(tokens=tokens) as server:
        path = "/legato.v1.ServerService/GetServerInfo"
        told = {
            (await call_empty(server.channel, path, REFUSED[kind])).message
            for kind in ("unknown id", "wrong secret", "no secret", "basic")
        }
        assert len(told) == 1


@pytest.mark.parametrize("scope", [*SCOPES, "all"])
async def test_a_credential_calls_what_its_scopes_allow(tokens, scope):
    """All else is PERMISSION_DENIED FORBIDDEN and names the scope."""
    token = BY_SCOPE.get(scope, ALL)
    held = {Need.NOTHING, Need.CREDENTIAL, *(SCOPES if scope == "all" else [scope])}
    refused = set()
    async with running(tokens=tokens) as server:
        for path in methods():
            failed = await call_empty(server.channel, path, token.metadata)
            codes = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
            if NEEDS[path] in held:
                assert failed is None or failed.code not in codes, path
                continue
            refused.add(path)
            assert failed.code is grpc.StatusCode.PERMISSION_DENIED, path
            assert failed.reason == "FORBIDDEN"
            assert failed.details["ErrorInfo"].metadata["scope"] == NEEDS[path]
    assert bool(refused) == (scope != "all")


async def test_unknown_methods_are_unimplemented_with_any_credential(tokens):
    """Their names are neither kept nor logged."""
    async with running(tokens=tokens) as server:
        for path in ("/legato.v1.InferenceService/Nothing", "/no.such/Method"):
            failed = await call_empty(server.channel, path, BY_SCOPE["upload"].metadata)
            assert failed.code is grpc.StatusCode.UNIMPLEMENTED


async def test_a_method_without_an_entry_is_refused(tokens, monkeypatch):
    """Also to a credential with all scopes."""
    path = "/legato.v1.InferenceService/Detect"
    monkeypatch.delitem(NEEDS, path)
    async with running(tokens=tokens) as server:
        failed = await call_empty(server.channel, path, ALL.metadata)
        assert failed.code is grpc.StatusCode.PERMISSION_DENIED


async def test_the_scheme_is_read_in_either_case(tokens):
    async with running(tokens=tokens) as server:
        path = "/legato.v1.ServerService/GetServerInfo"
        metadata = (("authorization", f"bearer {ALL.text}"),)
        assert await call_empty(server.channel, path, metadata) is None


async def test_a_server_without_credentials_ignores_them():
    """As any other metadata that it does not know."""
    async with running() as server:
        for path in methods():
            failed = await call_empty(server.channel, path, REFUSED["twice"])
            assert failed is None or failed.reason not in ("UNAUTHENTICATED", "FORBIDDEN")


async def test_malformed_metadata_is_not_explained_to_strangers(tokens):
    """The credential is checked before everything else."""
    async with running(tokens=tokens) as server:
        priority = (("legato-priority", "high"),)
        path = "/legato.v1.InferenceService/Query"
        failed = await call_empty(server.channel, path, priority)
        assert failed.reason == "UNAUTHENTICATED"
        failed = await call_empty(server.channel, path, (*priority, *ALL.metadata))
        assert failed.reason == "INVALID_FIELD"


async def test_admin_on_its_own_tcp_listener_needs_the_scope(tokens):
    """The same table holds there."""
    async with (
        running(tokens=tokens, admin_listen="127.0.0.1:0") as server,
        grpc.aio.insecure_channel(server.server.admin_address) as channel,
    ):
        path = "/legato.v1.AdminService/GetLoad"
        assert (await call_empty(channel, path, ())).reason == "UNAUTHENTICATED"
        failed = await call_empty(channel, path, BY_SCOPE["infer"].metadata)
        assert failed.reason == "FORBIDDEN"
        assert await call_empty(channel, path, BY_SCOPE["admin"].metadata) is None


async def test_a_unix_socket_is_protected_by_its_mode(tokens, tmp_path):
    """The user that runs the server needs no token there."""
    async with running(tokens=tokens, admin_listen=f"unix:{tmp_path}/a.sock") as server:
        async with grpc.aio.insecure_channel(server.server.admin_address) as channel:
            assert await call_empty(channel, "/legato.v1.AdminService/GetLoad", ()) is None
        path = "/legato.v1.AdminService/GetLoad"
        assert await call_empty(server.channel, path, ALL.metadata) is None, "main has it too"


async def test_the_health_listener_has_health_alone(tokens):
    """Probes bring neither TLS nor credentials."""
    async with (
        running(tokens=tokens, health_listen="127.0.0.1:0") as server,
        grpc.aio.insecure_channel(server.server.listeners.health_address) as channel,
    ):
        for path in methods():
            failed = await call_empty(channel, path, ALL.metadata)
            if path.startswith("/grpc.health."):
                assert failed is None, path
            else:
                assert failed.code is grpc.StatusCode.UNIMPLEMENTED, path


async def test_the_metadata_of_the_failure_is_typed(tokens):
    """Details as for every other error, and no hint to retry."""
    async with running(tokens=tokens) as server:
        failed = await refusal(server.info.GetServerInfo(server_pb2.GetServerInfoRequest()))
        assert set(failed.details) == {"ErrorInfo", "RequestInfo"}
        assert "grpc-retry-pushback-ms" not in failed.trailers


@pytest.mark.parametrize("kind", ["none", "wrong secret", "expired"])
async def test_a_credential_is_looked_at_before_the_message(tokens, kind):
    """A call that never sends its message is refused all the same, by every method."""

    async def silent():
        await asyncio.Event().wait()
        yield b""

    async with running(tokens=tokens) as server:
        for path, need in NEEDS.items():
            if need is Need.NOTHING or path == UNKNOWN_METHOD:
                continue
            call = server.channel.stream_unary(path)(silent(), metadata=REFUSED[kind])
            failed = await refusal(call)
            assert failed.code is grpc.StatusCode.UNAUTHENTICATED, path


async def test_a_scope_is_looked_at_before_the_message(tokens):
    """So is what the credential may do."""

    async def silent():
        await asyncio.Event().wait()
        yield b""

    async with running(tokens=tokens) as server:
        call = server.channel.stream_unary("/legato.v1.InferenceService/Query")(
            silent(), metadata=BY_SCOPE["upload"].metadata
        )
        assert (await refusal(call)).code is grpc.StatusCode.PERMISSION_DENIED
