"""TLS and tokens: what reaches the server, and what never leaves."""

from __future__ import annotations

import asyncio
import pickle
import traceback

import grpc
import pytest
from google.rpc import status_pb2
from legato_client import (
    AsyncClient,
    CaptionTask,
    Client,
    DetectTask,
    InternalError,
    InvalidArgument,
    Numeric,
    PermissionDenied,
    Poisoned,
    Unauthenticated,
    Unavailable,
    UnencryptedToken,
)
from legato_client._grpc.settings import TokenSource, is_local, read_security

from tests.clients.python.fake_server import FakeServer, failure
from tests.clients.python.secure_server import GOOD, Certificates, TokenCheck

IMAGE = b"\xff\xd8\xff"
OTHER = "legato_robot-7_c2Vjb25kc2Vjb25kc2Vjb25k"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Certificates of one authority."""
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def tokens():
    """A check that accepts one token."""
    return TokenCheck(GOOD)


@pytest.fixture
def server(certificates, tokens):
    """A scripted server with TLS that asks for a token."""
    with FakeServer(certificates.server_credentials(), (tokens,)) as fake:
        yield fake


def detect(kind, target, **settings):
    """Call with either client, once."""
    if kind == "sync":
        with Client(target, timeout=20, **settings) as client:
            return client.detect(IMAGE, "cat")
    return asyncio.run(_detect(target, settings))


async def _detect(target, settings):
    async with AsyncClient(target, timeout=20, **settings) as client:
        return await client.detect(IMAGE, "cat")


EITHER = pytest.mark.parametrize("kind", ["sync", "async"])


@EITHER
@pytest.mark.parametrize("form", ["path", "text", "bytes", "credentials"])
def test_a_call_over_tls_with_a_token(kind, form, server, certificates, tokens):
    """The authority is named by a path, as text or not, or by its bytes; the token arrives."""
    pem = certificates.ca.read_bytes()
    ca = {"path": certificates.ca, "text": str(certificates.ca), "bytes": pem}
    if form == "credentials":
        named = {"credentials": grpc.ssl_channel_credentials(pem)}
    else:
        named = {"ca": ca[form]}
    assert detect(kind, server.target, token=GOOD, **named).objects
    assert tokens.seen == [f"Bearer {GOOD}"]


def test_every_kind_of_call_carries_the_token(server, certificates, tokens):
    """Unary calls, streams, uploads and sessions, of both clients."""
    with Client(server.target, ca=certificates.ca, token=GOOD) as client:
        client.detect(IMAGE, "cat")
        list(client.generate(IMAGE, CaptionTask()))
        client.put_image(IMAGE)
        with client.session([DetectTask("cat")]) as session:
            assert session.terms.session_id

    async def all_async():
        async with AsyncClient(server.target, ca=certificates.ca, token=GOOD) as client:
            await client.detect(IMAGE, "cat")
            assert [event async for event in client.generate(IMAGE, CaptionTask())]
            await client.put_image(IMAGE)
            async with client.session([DetectTask("cat")]) as session:
                assert session.terms.session_id

    asyncio.run(all_async())
    assert tokens.seen == [f"Bearer {GOOD}"] * 8


@EITHER
def test_a_client_certificate(kind, certificates):
    """A server that asks for one serves who has it, and no other."""
    with FakeServer(certificates.server_credentials(asks_client=True)) as server:
        own = {"cert": certificates.client_cert, "key": certificates.client_key}
        assert detect(kind, server.target, ca=certificates.ca, **own).objects
        with pytest.raises(Unavailable):
            detect(kind, server.target, ca=certificates.ca)


@EITHER
@pytest.mark.parametrize("token", ["", OTHER])
def test_a_call_without_a_valid_token(kind, token, server, certificates):
    """It is UNAUTHENTICATED with its reason."""
    with pytest.raises(Unauthenticated) as caught:
        detect(kind, server.target, ca=certificates.ca, token=token)
    assert caught.value.reason == "UNAUTHENTICATED"
    assert not server.requests


@EITHER
def test_a_server_of_another_authority_gets_nothing(kind, server, tmp_path, tokens):
    """The connection is refused before any call, and the token with it."""
    stranger = Certificates.make(tmp_path)
    for settings in ({"ca": stranger.ca}, {"tls": True}):
        with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
            detect(kind, server.target, token=GOOD, **settings)
    assert not tokens.seen


# ---------------------------------------------------------------- where a token may go


@EITHER
@pytest.mark.parametrize("variable", [False, True])
def test_a_token_does_not_leave_the_host_unencrypted(kind, variable, monkeypatch):
    """The refusal comes before any connection, also for the environment's token."""
    if variable:
        monkeypatch.setenv("LEGATO_TOKEN", GOOD)
    with pytest.raises(UnencryptedToken) as caught:
        (Client if kind == "sync" else AsyncClient)(
            "robots.example:50051", token=None if variable else GOOD
        )
    assert GOOD not in str(caught.value)


def test_a_token_in_plain_text_stays_on_the_host(tokens, monkeypatch):
    """It goes to the loopback, past a proxy of the environment."""
    monkeypatch.setenv("LEGATO_TOKEN", GOOD)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with FakeServer(None, (tokens,)) as server:
        assert detect("sync", server.target).objects


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_server_on_this_host_is_reached_past_the_proxy(kind, host, monkeypatch):
    """With or without a token: a proxy of the environment knows another loopback."""
    monkeypatch.setenv("LEGATO_TOKEN", "")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with FakeServer() as server:
        assert detect(kind, server.target.replace("127.0.0.1", host)).objects


@pytest.mark.parametrize(
    "target",
    [
        "localhost:50051",
        "LOCALHOST",
        "127.0.0.1:50051",
        "127.9.9.9:1",
        "[::1]:50051",
        "::1",
        "unix:/run/legato.sock",
        "unix:///run/legato.sock",
        "unix-abstract:legato",
        "dns:localhost:50051",
        "dns:///localhost:50051",
        "ipv4:127.0.0.1:1,127.0.0.2:2",
        "ipv6:[::1]:50051",
    ],
)
def test_local_targets(target):
    """Every form of gRPC's names for this host."""
    assert is_local(target)


@pytest.mark.parametrize(
    "target",
    [
        "robots.example:50051",
        "10.0.0.7:50051",
        "0.0.0.0:50051",
        "[::]:50051",
        "[fe80::1]:50051",
        "localhost.example:50051",
        "127.0.0.1.example:50051",
        "127.0.0.1:50051@robots.example",
        "dns://8.8.8.8/localhost:50051",
        "dns:///robots.example:50051",
        "ipv4:127.0.0.1:1,10.0.0.7:2",
        "xds:///localhost",
        "vsock:1:2",
        "127.0.0.1:1,robots.example:2",
        "",
    ],
)
def test_targets_that_may_be_elsewhere(target):
    """Whatever is not certain to be this host is not."""
    assert not is_local(target)


# ---------------------------------------------------------------- rotation


@EITHER
@pytest.mark.parametrize("source", ["file", "function"])
def test_a_token_is_replaced_between_calls(kind, source, server, certificates, tokens, tmp_path):
    """The next call after a change has the new token, over the same connection."""
    tokens.accepted |= {OTHER}
    path = tmp_path / "token"
    path.write_text(GOOD + "\n")
    current = [GOOD]
    token = path if source == "file" else lambda: current[0]

    def replace():
        (tmp_path / "new").write_text(OTHER)
        (tmp_path / "new").replace(path)
        current[0] = OTHER

    if kind == "sync":
        with Client(server.target, ca=certificates.ca, token=token) as client:
            client.detect(IMAGE, "cat")
            replace()
            client.detect(IMAGE, "cat")
    else:

        async def both():
            async with AsyncClient(server.target, ca=certificates.ca, token=token) as client:
                await client.detect(IMAGE, "cat")
                replace()
                await client.detect(IMAGE, "cat")

        asyncio.run(both())
    assert tokens.seen == [f"Bearer {GOOD}", f"Bearer {OTHER}"]


def test_a_token_file_may_begin_with_a_mark(server, certificates, tokens, tmp_path):
    """Some editors put one before UTF-8; it is not part of the token."""
    path = tmp_path / "token"
    path.write_text(GOOD + "\r\n", "utf-8-sig")
    with Client(server.target, ca=certificates.ca, token=path) as client:
        client.detect(IMAGE, "cat")
    assert tokens.seen == [f"Bearer {GOOD}"]


def test_a_token_file_that_is_gone(server, certificates, tmp_path):
    """The client does not begin without it, and a call after it went is a typed error."""
    path = tmp_path / "token"
    with pytest.raises(Unauthenticated, match="cannot read the token file"):
        Client(server.target, ca=certificates.ca, token=path)
    path.write_text(GOOD)
    with Client(server.target, ca=certificates.ca, token=path) as client:
        client.detect(IMAGE, "cat")
        path.unlink()
        with pytest.raises(Unauthenticated, match="cannot read the token file"):
            client.detect(IMAGE, "cat")


# ---------------------------------------------------------------- secrecy and misuse


@pytest.mark.parametrize("bad", ["two words", "line\nbreak", "ümlaut", "x" * 9000])
def test_a_malformed_token_is_not_repeated(bad, tmp_path):
    """The error of gRPC itself would show it."""
    path = tmp_path / "token"
    path.write_text(bad, "utf-8")
    for token in (bad, path):
        with pytest.raises((InvalidArgument, Unauthenticated)) as caught:
            Client("127.0.0.1:1", token=token)
        assert bad not in "".join(traceback.format_exception(caught.value))


def test_no_text_of_a_client_shows_its_token(server, certificates):
    """Neither the reprs of its parts nor an error with its traceback."""
    client = Client(server.target, ca=certificates.ca, token=OTHER)
    with client, pytest.raises(Unauthenticated) as caught:
        client.detect(IMAGE, "cat")
    parts = [client, client._calls, client._connection, client._calls._settings]
    parts += [client._calls._settings.security, TokenSource(OTHER)]
    texts = [repr(part) for part in parts]
    texts += ["".join(traceback.format_exception(caught.value)), repr(caught.value.__cause__)]
    texts.append(read_security(server.target, ca=certificates.ca, token=OTHER).describe())
    assert not [text for text in texts if OTHER.rpartition("_")[2] in text]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tls": False, "ca": b"-----BEGIN "}, "need TLS"),
        ({"cert": b"-----BEGIN "}, "both cert and key"),
        ({"ca": b"nothing"}, "not in PEM form"),
        ({"ca": b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"}, "no valid"),
        ({"tls": True, "credentials": grpc.ssl_channel_credentials()}, "exclude"),
    ],
)
def test_settings_that_make_no_connection(settings, problem):
    """They are refused by name; gRPC would fail every call without a reason."""
    with pytest.raises(ValueError, match=problem):
        Client("127.0.0.1:1", **settings)


def test_the_security_of_a_load_travels_to_its_senders(certificates):
    """It pickles, with its token."""
    made = read_security("127.0.0.1:1", ca=certificates.ca, token=GOOD)
    sent = pickle.loads(pickle.dumps(made))
    assert sent.metadata() == (("authorization", f"Bearer {GOOD}"),)
    assert sent.credentials is not None


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", Unauthenticated),
        (grpc.StatusCode.PERMISSION_DENIED, "FORBIDDEN", PermissionDenied),
        (grpc.StatusCode.INTERNAL, "POISONED", Poisoned),
        (grpc.StatusCode.INTERNAL, "NUMERIC", Numeric),
        (grpc.StatusCode.INTERNAL, "INTERNAL", InternalError),
    ],
)
def test_the_errors_of_this_contract_are_typed(code, reason, kind):
    """The class is by code and reason, and `metadata` is the server's."""
    from legato_client._errors import from_status

    status: status_pb2.Status = failure(code, reason, scope="infer").status()
    error = from_status(status)
    assert type(error) is kind
    assert (error.code, error.reason) == (code.name, reason)
    assert error.metadata == {"scope": "infer"}
