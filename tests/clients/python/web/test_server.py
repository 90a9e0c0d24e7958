"""The HTTP process: where it listens, as whom it calls, and the limits of its connections."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import http.client
import json
import logging
import os
import resource
import socket
import ssl
import time
import urllib.request

import grpc
import pytest
from legato.v1 import inference_pb2, task_pb2
from legato_client import AsyncClient
from legato_client._grpc.settings import TokenSource
from legato_client.web import connections, server
from legato_client.web.connections import Acceptor, ConnectionLimits
from legato_client.web.listen import Listen
from legato_client.web.server import LoopStalls

from tests.clients.python.fake_server import events, failure
from tests.clients.python.web.serving import CHAT, HELLO, PATIENCE, connect, serving
from tests.e2e.server import Server
from tests.faults.http_attacks import ATTACKERS, ATTACKS, ROBOT, Memory, legato_http, measure
from tests.service.access.credentials import Authority, Files, write

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


# ---------------------------------------------------------------- connections
# Limits of connections: silent, slow and numerous clients leave the listener to others.

HALF = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
BOUND = 60 * 1024 * 1024  # bytes of memory


def open_connection(web):
    """A connection that says nothing by itself."""
    host, _, port = web.url.partition("://")[2].partition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def is_closed(connection):
    """Return once the server has closed it; a timeout is an error."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass
    return True


@pytest.fixture(scope="module")
def impatient():
    """A listener that waits half a second for heads, and has eight connections."""
    with serving(limits=ConnectionLimits(connections=8, requests=4, head_timeout=0.5)) as web:
        yield web


@pytest.mark.parametrize("sent", [b"", b"G", HALF, HALF + b"\r\n" + HALF, b"\r\n" * 3])
def test_half_a_head_ends_the_connection(impatient, sent):
    """Whether nothing was sent, a part of the head, or a part of that of a further request."""
    with open_connection(impatient) as connection:
        connection.sendall(sent)
        assert is_closed(connection)


def test_a_head_that_trickles_ends_the_connection(impatient):
    """The whole head has a time, not the pause between two bytes of it."""
    with open_connection(impatient) as connection, contextlib.suppress(ConnectionError):
        while True:  # the test's own timeout ends it
            connection.sendall(b"G")
            connection.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                if not connection.recv(100):
                    break


@pytest.mark.parametrize("length", [None, 10**7])
def test_silent_connections_make_room(length):
    """Those that owe a head or a body go first, not a new one whose request is on its way."""
    begun = b"POST /v1/query HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sent = HALF if length is None else begun + f"Content-Length: {length}\r\n\r\n{{".encode()
    with serving(limits=ConnectionLimits(connections=16)) as web, contextlib.ExitStack() as silent:
        for _ in range(40):
            silent.enter_context(open_connection(web)).sendall(sent)
        assert web.get("/healthz").status == 200  # what the others sent has been read
        with contextlib.closing(connect(web.url)) as slow:
            slow.connect()
            for _ in range(4):
                silent.enter_context(open_connection(web)).sendall(sent)
            time.sleep(0.1)  # these have made room for themselves
            slow.request("GET", "/healthz")
            assert slow.getresponse().status == 200
        for _ in range(3):
            assert web.get("/healthz").status == 200
            assert web.post("/v1/query", QUERY).status == 200


def test_requests_beyond_the_limit_come_back_later(impatient):
    """More requests than are answered at once get a 503 that says when; health checks do not."""
    begun = b"POST /v1/query HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with contextlib.ExitStack() as running:
        for _ in range(4):
            connection = running.enter_context(open_connection(impatient))
            connection.sendall(begun + b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 100")  # it is being answered
        reply = impatient.post("/v1/query", QUERY)
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert reply.error["code"] == "queue_full"
        assert impatient.get("/healthz").status == impatient.get("/readyz").status == 200
    while impatient.post("/v1/query", QUERY).status != 200:
        pass  # until the four have left; the test's own timeout ends it


def test_requests_sent_ahead_are_not_answered_in_one_go():
    """One connection gets no more than its share: it is closed a while after the first answer."""
    begun = time.monotonic()
    limits = ConnectionLimits(ahead_pause=0.5)
    with serving(limits=limits) as web, open_connection(web) as connection:
        connection.sendall((HALF + b"\r\n") * 100)
        assert connection.recv(4096).count(b"HTTP/1.1 200 ") == 1
        assert is_closed(connection)
    assert time.monotonic() - begun >= 0.5


def test_a_refusal_arrives_before_the_body_has_been_sent(web):
    """A client that sends a large body reads why it was refused; the rest is not parsed."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    body = b"[" * (32 * 1024 * 1024)
    with open_connection(web) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        connection.sendall(body)
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_an_unread_answer_ends_the_connection():
    """A client that does not read its stream loses it, and the call is cancelled."""
    long = inference_pb2.TextDelta(text="x" * 500_000)
    told = events(*[("text", long)] * 200, finished=task_pb2.TaskResult())[:-1]
    with (
        serving(limits=ConnectionLimits(write_timeout=0.5)) as web,
        socket.socket() as connection,
    ):
        web.fake.script["Generate"].append(told)
        host, _, port = web.url.partition("://")[2].partition(":")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        body = b'{"messages": [{"role": "user", "content": "x"}], "stream": true}'
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert web.fake.stream_ended.wait(PATIENCE)
        assert not web.fake.num_completed


def test_handshakes_have_a_time_and_make_room(tmp_path):
    """Connections that never begin TLS are limited like all others."""
    authority = Authority()
    files = Files(tmp_path, authority.server())
    listen = Listen("127.0.0.1:0", tls_cert=str(files.cert), tls_key=str(files.key))
    limits = ConnectionLimits(connections=8, head_timeout=1.0)
    trusting = ssl.create_default_context(cadata=authority.pem.decode())
    with serving(listen=listen, limits=limits) as web, contextlib.ExitStack() as silent:
        opened = [silent.enter_context(open_connection(web)) for _ in range(40)]
        with (
            open_connection(web) as plain,
            trusting.wrap_socket(plain, server_hostname="localhost") as own,
        ):
            own.sendall(HALF + b"Connection: close\r\n\r\n")
            assert own.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert all(map(is_closed, opened))


async def test_failed_accepts_are_logged_now_and_then(monkeypatch, caplog):
    """Without free descriptors the listener tries again, and says so once in a while."""
    tried = 0
    enough = asyncio.Event()

    async def no_descriptor(_listening):
        nonlocal tried
        tried += 1
        if tried == 1000:
            enough.set()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(connections, "_ACCEPT_PAUSE", 0.0)
    monkeypatch.setattr(asyncio.get_running_loop(), "sock_accept", no_descriptor, raising=False)
    with socket.socket() as listening, caplog.at_level(logging.ERROR, connections.__name__):
        acceptor = Acceptor(listening, asyncio.Protocol, set(), ConnectionLimits(), None)
        running = asyncio.create_task(acceptor.run())
        await enough.wait()
        running.cancel()
    assert len(caplog.records) < 10
    assert "EMFILE" in caplog.text


@pytest.mark.parametrize("soft", [64, 256, 1024, 1152, 1 << 20])
def test_connections_fit_into_the_files_of_the_process(soft, monkeypatch):
    """Fewer where this process may open fewer files, and always some beside the requests."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    limits = ConnectionLimits.of_process()
    assert 0 < limits.requests < limits.connections < max(soft, 1025)
    assert (limits == ConnectionLimits()) == (soft >= 1152)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A server of the null engine that asks for tokens."""
    folder = tmp_path_factory.mktemp("guarded")
    write(folder / "tokens.toml", ROBOT)
    with Server(folder, "--model", "null", "--tokens", str(folder / "tokens.toml")) as server:
        yield server.address


@pytest.mark.parametrize(
    ("command", "name", "knows"),
    [
        ("http", "ignored_fields", False),
        ("http", "ignored_fields", True),
        ("http", "small_strings", True),
        ("http", "wide_text", False),
        ("http", "announced_bodies", False),
        ("playground", "ignored_fields", False),
        ("playground", "announced_bodies", True),
    ],
)
def test_attackers_take_no_memory_and_leave_room(guarded, tmp_path, command, name, knows):
    """Beside four of them others are answered, whether or not the server `knows` their token."""
    token = tmp_path / "token"
    token.write_text(ROBOT.text)
    with legato_http(guarded, "--token-file", str(token), command=command) as (stranger, pid):
        caller = dataclasses.replace(stranger, token=ROBOT.text)
        measure(caller, 0.5)
        memory = Memory(pid)

        async def beside_attackers():
            attack, attacker = ATTACKS[name], caller if knows else stranger
            running = [asyncio.create_task(attack(attacker)) for _ in range(ATTACKERS)]
            times = await asyncio.to_thread(measure, caller, 1.0)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            return times

        times = asyncio.run(beside_attackers())
        assert times.failures == 0
        assert memory.growth < BOUND
