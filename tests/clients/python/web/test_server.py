"""The HTTP process: where it listens, as whom it calls, how healthy it is."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json
import ssl
import time
import urllib.request

import grpc
import pytest
from legato_client import AsyncClient
from legato_client._grpc.settings import TokenSource
from legato_client.web import server
from legato_client.web.listen import Listen
from legato_client.web.server import LoopStalls

from tests.clients.python.failures import failure
from tests.clients.python.web.serving import CHAT, HELLO, connect, serving
from tests.service.access.certificates import Authority, Files

QUERY = {"question": "why?"}
PROTECTED = Listen("0.0.0.0:80", tls_cert=__file__, tls_key=__file__, require_token=True)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:80", "[::1]:80", "127.9.9.9:1"])
def test_loopback_needs_no_protection(address):
    """Addresses that no other machine can reach are taken as they are."""
    Listen(address).check()


@pytest.mark.parametrize("address", ["0.0.0.0:80", "[::]:80", "a.example:80", "10.0.0.1:0"])
def test_others_need_protection(address):
    """Any other address needs TLS and tokens, both, or to be allowed."""
    protected = dataclasses.replace(PROTECTED, address=address)
    protected.check()
    Listen(address, allow_remote=True).check()
    for part in (
        dataclasses.replace(protected, require_token=False),
        dataclasses.replace(protected, tls_cert="", tls_key=""),
    ):
        with pytest.raises(ValueError, match="others can reach"):
            part.check()


@pytest.mark.parametrize("address", ["", "8080", ":8080", "127.0.0.1", "127.0.0.1:65536", "h:p"])
def test_malformed_addresses(address):
    """What is not HOST:PORT is refused."""
    with pytest.raises(ValueError, match="HOST:PORT"):
        Listen(address).check()


@pytest.mark.parametrize(
    ("headers", "sent"),
    [
        ({"Authorization": "Bearer legato_a_b"}, "Bearer legato_a_b"),
        ({"authorization": "bearer  legato_a_b "}, "Bearer legato_a_b"),
        ({"X-Moondream-Auth": "legato_c_d"}, "Bearer legato_c_d"),
        ({"Authorization": "Bearer x", "X-Moondream-Auth": "y"}, "Bearer x"),
        ({"Authorization": "Bearer "}, None),
        ({}, None),
    ],
)
def test_the_callers_token_is_passed_on(web, headers, sent):
    """Each request calls with its own token, whoever called before it."""
    web.post("/v1/query", QUERY, {"Authorization": "Bearer of-another-caller"})
    assert web.post("/v1/query", QUERY, headers).status == 200
    _, _, metadata = web.fake.requests[-1]
    assert metadata.get("authorization") == sent


@pytest.mark.parametrize("token", ["a b", "a\tb", "é", "x" * 8193])
def test_a_malformed_token_is_not_taken_for_none(web, token):
    """A token that cannot be one is refused, so that no other credential is used instead."""
    headers = {"Authorization": f"Bearer {token}".encode("latin-1").decode("latin-1")}
    reply = web.post("/v1/query", QUERY, headers)
    assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
    assert token not in reply.error["message"]
    assert not web.fake.requests


@pytest.mark.parametrize("scheme", ["Basic dXNlcjpwYXNz", "Digest x", "Bearer\tx", "x"])
def test_another_scheme_is_not_taken_for_no_token(web, scheme):
    """Credentials of a scheme that is not served are refused: no other credential is used."""
    for more in ({}, {"X-Moondream-Auth": "legato_c_d"}):
        reply = web.post("/v1/query", QUERY, {"Authorization": scheme, **more})
        assert (reply.status, reply.error["code"]) == (401, "unauthenticated")
    assert web.send("GET", "/healthz", b"", {"Authorization": scheme}).status == 200
    assert not web.fake.requests


async def test_a_function_may_have_no_token():
    """A client whose function has no token now sends none, and not that of the call before."""
    tokens = iter(["legato_a_b", "", ""])
    source = TokenSource(lambda: next(tokens))
    assert [source.read(), source.read(), source.credential] == ["legato_a_b", "", ""]
    assert server.token() == ""
    async with AsyncClient("127.0.0.1:1", token=server.token) as client:
        assert not [key for key, _ in client._connection.metadata() if key == "authorization"]


def test_pages_of_other_names_are_refused(web):
    """On loopback a Host that is no name of this host is refused: a browser's page can send it."""
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:8080", ""):
        reply = web.send("GET", "/healthz", b"", {"host": host})
        assert (reply.status, reply.error["code"]) == (400, "wrong_host")
    for host in ("localhost", "localhost:1", "127.0.0.1", "[::1]:80"):
        assert web.send("GET", "/healthz", b"", {"host": host}).status == 200


def test_a_connection_is_kept(web):
    """One connection carries answers, streams and refusals, one after the other."""
    sent = {"content-type": "application/json"}
    hello = {"messages": HELLO}
    with contextlib.closing(connect(web.url)) as connection:
        connection.connect()
        first = connection.sock
        for body, status in [
            (hello, 200),
            ({**hello, "stream": True}, 200),
            ({**hello, "n": 2}, 400),
            ({**hello, "logprobs": True}, 200),
        ]:
            connection.request("POST", CHAT, json.dumps(body), sent)
            response = connection.getresponse()
            assert (response.status, bool(response.read())) == (status, True)
            assert connection.sock is first


def test_tokens_may_be_required():
    """With --require-token a request without a token of its own asks nothing of the server."""
    with serving(listen=Listen("127.0.0.1:0", require_token=True)) as web:
        for path, body in ((CHAT, {"messages": HELLO}), ("/v1/query", QUERY)):
            assert web.post(path, body).status == 401
            assert web.post(path, body, {"Authorization": "Bearer "}).status == 401
        assert not web.fake.requests
        assert web.post("/v1/query", QUERY, {"Authorization": "Bearer t"}).status == 200
        assert web.get("/healthz").status == web.get("/openapi.json").status == 200


def test_https(tmp_path):
    """With a certificate the same routes are served over TLS, and not without it."""
    authority = Authority()
    files = Files(tmp_path, authority.server())
    listen = Listen("127.0.0.1:0", tls_cert=str(files.cert), tls_key=str(files.key))
    with serving(listen=listen) as web:
        assert web.url.startswith("https://")
        trusting = ssl.create_default_context(cadata=authority.pem.decode())
        with urllib.request.urlopen(f"{web.url}/healthz", context=trusting) as reply:
            assert json.load(reply) == {"status": "ok"}
        with pytest.raises((http.client.BadStatusLine, ConnectionError)):
            web.get("/healthz")


def test_a_token_is_checked_before_the_body(web):
    """A caller that the server refuses is answered with that, whatever it sends."""
    token = {"Authorization": "Bearer of-nobody"}
    for body in (QUERY, {"question": 5}):
        refusal = failure(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
        web.fake.script["GetServerInfo"].append(refusal)
        reply = web.post("/v1/query", body, token)
        assert (reply.status, reply.error["code"]) == (401, "unauthenticated")
    assert not web.fake.requests
    assert web.post("/v1/query", QUERY, token).status == 200  # not remembered as refused


def test_aliases():
    """An alias of a model stands for its model, or for the default one."""
    with serving(aliases={"gpt": "fake/cups@1", "any": ""}) as web:
        for name, model, adapter in (("gpt", "fake", "cups@1"), ("any", "", ""), ("m", "m", "")):
            web.post("/v1/query", {**QUERY, "model": name})
            options = web.fake.last("Query").options
            assert (options.model, options.adapter) == (model, adapter)


async def test_the_longest_stall_is_what_held_the_event_loop():
    """A handler that does not yield is seen once it has ended."""
    stalls = LoopStalls()
    measuring = asyncio.create_task(stalls.run())
    await asyncio.sleep(0)
    time.sleep(0.2)  # noqa: ASYNC251 - the stall
    await asyncio.sleep(2 * LoopStalls.PERIOD)
    assert stalls.longest >= 0.2 - LoopStalls.PERIOD
    measuring.cancel()


def test_metrics_need_no_token(web):
    """Prometheus reads the stall and the memory of bodies."""
    lines = (
        web.send("GET", "/metrics", b"", {"Authorization": "Basic x"}).body.decode().splitlines()
    )
    found = dict(line.split() for line in lines if not line.startswith("#"))
    assert float(found["legato_http_event_loop_longest_stall_seconds"]) >= 0
    assert float(found["legato_http_body_memory_bytes"]) == 0


def test_health(web):
    """The process is healthy by itself, and ready while its server answers, a refusal too."""
    assert web.get("/healthz").json == web.get("/readyz").json == {"status": "ok"}
    refusal = failure(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    web.fake.script["GetServerInfo"].append(refusal)
    assert web.get("/readyz").status == 200
    web.fake.script["GetServerInfo"].extend([failure(grpc.StatusCode.UNAVAILABLE, "DRAINING")] * 10)
    assert web.get("/readyz").status == 503
    assert web.get("/healthz").status == 200
