"""Every method by every kind of credential, quotas, and tenants that are kept apart."""

from __future__ import annotations

import asyncio
import functools
import io
from typing import Any

import grpc
import pytest
from legato.v1 import admin_pb2, image_pb2, inference_pb2, media_pb2, server_pb2, task_pb2
from legato_client._images.sources import SharedFrames
from legato_engine.errors import QuotaExceeded
from legato_service.access.principal import (
    NEEDS,
    UNKNOWN_METHOD,
    Need,
    Principal,
    Quotas,
    RateLimit,
)
from PIL import Image

from tests.service.access.credentials import Token, bearer, call_empty, methods, write
from tests.service.fakes import FakeEngine, answer, hold
from tests.service.harness import image_bytes, refusal, running, until
from tests.service.session.client import SessionClient, opening

# ---------------------------------------------------------------- methods and credentials

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
        grpc.aio.insecure_channel(server.server.listeners.admin_address) as channel,
    ):
        path = "/legato.v1.AdminService/GetLoad"
        assert (await call_empty(channel, path, ())).reason == "UNAUTHENTICATED"
        failed = await call_empty(channel, path, BY_SCOPE["infer"].metadata)
        assert failed.reason == "FORBIDDEN"
        assert await call_empty(channel, path, BY_SCOPE["admin"].metadata) is None


async def test_a_unix_socket_is_protected_by_its_mode(tokens, tmp_path):
    """The user that runs the server needs no token there."""
    async with running(tokens=tokens, admin_listen=f"unix:{tmp_path}/a.sock") as server:
        async with grpc.aio.insecure_channel(server.server.listeners.admin_address) as channel:
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


# ---------------------------------------------------------------- quotas

QUESTION = inference_pb2.QueryRequest(question="How many?")
SLOW = 1e-3  # units a second: no test lasts long enough for a second one


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tokens.toml"


class Clock:
    """Seconds that pass when a test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def taken(limit, clock, times, amount=1.0):
    """How many of `times` attempts at one moment succeed."""
    count = 0
    for _ in range(times):
        try:
            limit.take(amount, "a")
        except QuotaExceeded:
            continue
        count += 1
    return count


def test_a_rate_allows_a_second_at_once_and_then_the_rate():
    clock = Clock()
    limit = RateLimit("requests_per_second", 5, clock)
    assert taken(limit, clock, 50) == 5
    for _ in range(10):
        clock.now += 0.2
        assert taken(limit, clock, 50) == 1
    clock.now += 100
    assert taken(limit, clock, 50) == 5, "a pause saves no more than a second"


def test_the_refusal_says_when_the_next_is_possible():
    clock = Clock()
    limit = RateLimit("requests_per_second", 2, clock)
    assert taken(limit, clock, 2) == 2
    with pytest.raises(QuotaExceeded) as caught:
        limit.take(1, "a")
    wait = int(caught.value.metadata["retry_after_ms"]) / 1000
    assert wait == pytest.approx(0.5)
    clock.now += wait - 0.01
    assert taken(limit, clock, 1) == 0
    clock.now += 0.02
    assert taken(limit, clock, 1) == 1


def test_an_amount_above_the_rate_is_paid_for_afterwards():
    """A large image under a small rate is delayed, not impossible."""
    clock = Clock()
    limit = RateLimit("pixels_per_second", 1000, clock)
    assert taken(limit, clock, 1, amount=5000) == 1
    clock.now += 4.5
    assert taken(limit, clock, 1, amount=1000) == 0
    clock.now += 0.6
    assert taken(limit, clock, 1, amount=5000) == 1


def test_processes_share_the_limits():
    """Each enforces its part; the engine counts held bytes for all."""
    quotas = Quotas(requests_per_second=8, pixels_per_second=100, image_bytes=7, sessions=5)
    assert quotas.shared_by(4) == Quotas(
        requests_per_second=2, pixels_per_second=25, image_bytes=7, sessions=2
    )
    assert Quotas().shared_by(4) == Quotas()


def test_a_session_that_fails_gives_its_place_back():
    principal = Principal(credential="a", tenant="t", scopes=frozenset(), quotas=Quotas(sessions=1))
    for _ in range(3):
        with pytest.raises(RuntimeError), principal.session():
            raise RuntimeError
    with principal.session(), pytest.raises(QuotaExceeded), principal.session():
        pass


async def test_calls_over_the_rate_are_refused_with_a_delay(path):
    """The details name the quota, its limit and the credential; other credentials go on."""
    slow = Token("slow", ["infer"], requests_per_second=f"{SLOW:f}")
    fast = Token("fast", ["infer"])
    async with running(tokens=write(path, slow, fast)) as server:
        await server.inference.Query(QUESTION, metadata=slow.metadata)
        failed = await refusal(server.inference.Query(QUESTION, metadata=slow.metadata))
        assert failed.reason == "QUOTA_EXCEEDED"
        facts = failed.details["ErrorInfo"].metadata
        assert facts["quota"] == "requests_per_second"
        assert float(facts["limit"]) == SLOW
        assert failed.details["RetryInfo"].retry_delay.ToMilliseconds() > 0
        violation = failed.details["QuotaFailure"].violations[0]
        assert violation.subject == "credential:slow"
        assert len(server.engine.requests) == 1
        await server.inference.Query(QUESTION, metadata=fast.metadata)
        info = "/legato.v1.ServerService/GetServerInfo"
        assert await call_empty(server.channel, info, slow.metadata) is None, "not counted"


async def test_an_option_is_the_default_and_a_record_replaces_it(path):
    """0 in a record is no limit."""
    default, free = Token("d", ["infer"]), Token("f", ["infer"], requests_per_second="0")
    async with running(tokens=write(path, default, free), quota_requests=SLOW) as server:
        for _ in range(3):
            await server.inference.Query(QUESTION, metadata=free.metadata)
        await server.inference.Query(QUESTION, metadata=default.metadata)
        failed = await refusal(server.inference.Query(QUESTION, metadata=default.metadata))
        assert failed.reason == "QUOTA_EXCEEDED"


def png(width, height):
    data = io.BytesIO()
    Image.new("RGB", (width, height)).save(data, "PNG")
    return data.getvalue()


def layout(width, height):
    return media_pb2.PixelLayout(width=width, height=height, format=media_pb2.PIXEL_FORMAT_MONO8)


@pytest.mark.parametrize(
    "image",
    [
        media_pb2.Image(encoded=media_pb2.EncodedImage(data=png(40, 25))),
        media_pb2.Image(raw=media_pb2.RawImage(data=bytes(1000), layout=layout(40, 25))),
    ],
    ids=["file", "pixels"],
)
async def test_the_pixels_of_new_images_are_counted(path, image):
    """Of files and of raw pixels; images by their id cost nothing."""
    token = Token("a", ["infer"], pixels_per_second="10")
    query = inference_pb2.QueryRequest(question="?", image=image)
    async with running(tokens=write(path, token)) as server:
        await server.inference.Query(query, metadata=token.metadata)
        failed = await refusal(server.inference.Query(query, metadata=token.metadata))
        assert failed.reason == "QUOTA_EXCEEDED"
        facts = failed.details["ErrorInfo"].metadata
        assert (facts["quota"], facts["limit"], facts["actual"]) == (
            "pixels_per_second",
            "10",
            "1000",
        )
        known = media_pb2.Image(image_id="img_1")
        by_id = inference_pb2.QueryRequest(question="?", image=known)
        await server.inference.Query(by_id, metadata=token.metadata)


@pytest.mark.parametrize("kind", ["file", "pixels"])
async def test_the_pixels_of_uploads_are_counted(path, kind):
    token = Token("a", ["upload"], pixels_per_second="10")
    header = image_pb2.PutImageHeader(layout=layout(40, 25) if kind == "pixels" else None)
    data = bytes(1000) if kind == "pixels" else png(40, 25)
    messages = [image_pb2.PutImageRequest(header=header), image_pb2.PutImageRequest(chunk=data)]
    async with running(tokens=write(path, token)) as server:
        await server.images.PutImage(iter(messages), metadata=token.metadata)
        failed = await refusal(server.images.PutImage(iter(messages), metadata=token.metadata))
        assert failed.reason == "QUOTA_EXCEEDED"
        assert len(server.engine.holds) == 1


async def test_frames_of_a_session_count_as_requests(path):
    """A frame over the rate fails for all its tasks; the session goes on."""
    token = Token("a", ["infer"], requests_per_second="2")
    async with running(tokens=write(path, token)) as server:
        client = SessionClient(server.sessions.Session(metadata=token.metadata))
        await client.send(open=opening())
        await client.wait_for(lambda: client.opened.session_id)
        for sequence in range(1, 8):
            await client.frame(sequence)
            await client.outcome(sequence)
        refused = [
            result
            for results in client.results.values()
            for result in results
            if result.HasField("error")
        ]
        assert refused
        assert all(result.task_id == "cups" for result in refused)
        assert len(server.engine.requests) + len(refused) == 7
        await client.done()
        await client.end()


async def test_open_sessions_are_counted(path):
    """A place is free again when a session ends."""
    token = Token("a", ["infer"], sessions="1")
    async with running(tokens=write(path, token)) as server:
        for _ in range(2):
            await _fill_and_leave(server, token)


async def _fill_and_leave(server, token):
    """Open the one session, have a second refused, and close the first."""
    client = SessionClient(server.sessions.Session(metadata=token.metadata))
    await client.send(open=opening())
    await client.wait_for(lambda: client.opened.session_id)
    second = SessionClient(server.sessions.Session(metadata=token.metadata))
    failed = await second.failure()
    assert failed.reason == "QUOTA_EXCEEDED"
    assert failed.details["ErrorInfo"].metadata["quota"] == "sessions"
    await client.done()
    await client.end()


async def test_the_engine_learns_how_many_bytes_a_credential_may_hold(path):
    """0 leaves the engine's own limit."""
    small, usual = Token("s", ["upload"], image_bytes="1000"), Token("u", ["upload"])
    messages = [
        image_pb2.PutImageRequest(header=image_pb2.PutImageHeader()),
        image_pb2.PutImageRequest(chunk=image_bytes()),
    ]
    async with running(tokens=write(path, small, usual)) as server:
        for token in (small, usual):
            await server.images.PutImage(iter(messages), metadata=token.metadata)
        assert [hold.quota_bytes for hold in server.engine.holds] == [1000, 0]
        assert server.engine.holds[0].owner == "tenant:t"


# ---------------------------------------------------------------- shared images
# Shared memory needs a scope of its own: a region does not say which tenant wrote it.

ALLOWED = Token("arm-3", ["infer", "shared_images"], tenant="robots")
OTHER = Token("hall-3", ["infer", "upload"], tenant="others")


@pytest.fixture
def frame():
    """Yield an image in a region of this user."""
    with SharedFrames(1 << 16) as ring, ring.write(image_bytes()) as written:
        yield written.to_image()


@pytest.fixture
def sharing_tokens(tmp_path):
    """Return the settings of a server with both tokens."""
    return {"tokens": write(tmp_path / "tokens.toml", ALLOWED, OTHER), "shared_images": True}


async def test_a_credential_without_the_scope_reads_no_region(frame, sharing_tokens):
    """FORBIDDEN names the scope, before the region is opened; with it the image is read."""
    request = inference_pb2.DetectRequest(object="cup", image=frame)
    async with running(**sharing_tokens) as server:
        refused = await refusal(server.inference.Detect(request, metadata=OTHER.metadata))
        assert refused.code is grpc.StatusCode.PERMISSION_DENIED
        assert refused.reason == "FORBIDDEN"
        assert refused.details["ErrorInfo"].metadata["scope"] == "shared_images"
        request.image.shared.region = "legato-0-not-there"
        unknown = await refusal(server.inference.Detect(request, metadata=OTHER.metadata))
        assert unknown.reason == "FORBIDDEN"
        request.image.CopyFrom(frame)
        assert await server.inference.Detect(request, metadata=ALLOWED.metadata)
        assert len(server.engine.requests) == 1


async def test_a_session_without_the_scope_reads_no_region(frame, sharing_tokens):
    """The frame's result is FORBIDDEN, and the session goes on."""
    async with running(**sharing_tokens) as server:
        client = SessionClient(server.sessions.Session(metadata=OTHER.metadata))
        await client.send(open=opening())
        await client.frame(1, image=frame)
        await client.outcome(1)
        (result,) = client.results[1]
        assert result.error.code == grpc.StatusCode.PERMISSION_DENIED.value[0]
        await client.frame(2)
        await client.outcome(2)
        client.call.cancel()


# ---------------------------------------------------------------- tenants

NAMES = ("acme", "rival")
TASK = task_pb2.Task(query=task_pb2.QueryTask(question="How many?"))


def of(tenant, **more):
    """Return the metadata of a tenant's call."""
    values: Any = {"legato-tenant": tenant, **more}
    return tuple(values.items())


async def test_sessions_of_two_tenants_may_have_one_id():
    """A session keeps its id though another tenant has one of that id; its own second has not."""
    async with running(FakeEngine(hold)) as server:
        clients = []
        for tenant in (*NAMES, "acme"):
            call = server.sessions.Session(metadata=of(tenant, **{"x-request-id": "robot"}))
            clients.append(SessionClient(call))
            await clients[-1].send(open=opening())
            await clients[-1].wait_for(lambda: clients[-1].messages)
        ids = [client.opened.session_id for client in clients]
        assert ids[:2] == ["robot", "robot"]
        assert ids[2] != "robot"
        for client in clients:
            client.call.cancel()


async def test_an_operator_names_a_session_of_one_tenant_or_of_all():
    """Abort by a session's id is for the named tenant, or without one for every tenant."""
    async with running(FakeEngine(hold)) as server:
        clients = [
            SessionClient(server.sessions.Session(metadata=of(name, **{"x-request-id": "robot"})))
            for name in (*NAMES, "third")
        ]
        for client in clients:
            await client.send(open=opening())
            await client.wait_for(functools.partial(len, client.messages))
        abort = admin_pb2.AbortRequest(session_id="robot")
        assert (await server.admin.Abort(abort, metadata=of("acme"))).aborted == 1
        assert (await clients[0].failure()).reason == "PREEMPTED"
        assert (await server.admin.Abort(abort)).aborted == 2


async def test_a_reply_is_kept_for_its_tenant_only():
    """The same id and content of another tenant runs again; of the same tenant it does not."""
    async with running() as server:
        request = inference_pb2.QueryRequest(question="How many?")
        request.options.request_id = "r-1"
        for tenant, runs in (("acme", 1), ("rival", 2), ("acme", 2)):
            await server.inference.Query(request, metadata=of(tenant))
            assert len(server.engine.requests) == runs


async def test_an_id_in_use_is_no_duplicate_for_another_tenant():
    """A stream's request id is refused to its own tenant and to no other."""
    async with running(FakeEngine(hold)) as server:
        options = inference_pb2.RequestOptions(request_id="r-1")
        stream = server.inference.Generate(
            inference_pb2.GenerateRequest(task=TASK, options=options), metadata=of("acme")
        )
        await until(lambda: bool(server.engine.streams))
        server.engine.script = answer
        again = inference_pb2.QueryRequest(question="How many?", options=options)
        refused = await refusal(server.inference.Query(again, metadata=of("acme")))
        assert refused.code is grpc.StatusCode.ALREADY_EXISTS
        assert (await server.inference.Query(again, metadata=of("rival"))).answer
        stream.cancel()
