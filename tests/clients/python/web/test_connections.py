"""Limits of connections: silent, slow and numerous clients leave the listener to others."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import os
import resource
import socket
import ssl

import pytest
from legato.v1 import inference_pb2, task_pb2
from legato_client.web import connections
from legato_client.web.connections import Acceptor, ConnectionLimits
from legato_client.web.listen import Listen

from tests.clients.python.fake_server import events
from tests.clients.python.web.serving import CHAT, PATIENCE, serving
from tests.e2e.server import Server
from tests.faults.http_attacks import ATTACKERS, ATTACKS, ROBOT, Memory, legato_http, measure
from tests.service.access.certificates import Authority, Files
from tests.service.access.tokens import write

HALF = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
QUERY = {"question": "why?"}
BOUND = 60 * 1024 * 1024  # bytes of memory


def connect(web):
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
    with connect(impatient) as connection:
        connection.sendall(sent)
        assert is_closed(connection)


def test_a_head_that_trickles_ends_the_connection(impatient):
    """The whole head has a time, not the pause between two bytes of it."""
    with connect(impatient) as connection, contextlib.suppress(ConnectionError):
        while True:  # the test's own timeout ends it
            connection.sendall(b"G")
            connection.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                if not connection.recv(100):
                    break


@pytest.mark.parametrize("length", [None, 10**7])
def test_silent_connections_make_room(length):
    """Those that owe the server a head or a body go first when all connections are taken."""
    begun = b"POST /v1/query HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sent = HALF if length is None else begun + f"Content-Length: {length}\r\n\r\n{{".encode()
    with serving(limits=ConnectionLimits(connections=8)) as web, contextlib.ExitStack() as silent:
        for _ in range(40):
            silent.enter_context(connect(web)).sendall(sent)
        for _ in range(3):
            assert web.get("/healthz").status == 200
            assert web.post("/v1/query", QUERY).status == 200


def test_requests_beyond_the_limit_come_back_later(impatient):
    """More requests than are answered at once get a 503 that says when; health checks do not."""
    begun = b"POST /v1/query HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with contextlib.ExitStack() as running:
        for _ in range(4):
            connection = running.enter_context(connect(impatient))
            connection.sendall(begun + b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 100")  # it is being answered
        reply = impatient.post("/v1/query", QUERY)
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert reply.error["code"] == "queue_full"
        assert impatient.get("/healthz").status == impatient.get("/readyz").status == 200
    while impatient.post("/v1/query", QUERY).status != 200:
        pass  # until the four have left; the test's own timeout ends it


def test_requests_sent_ahead_are_not_answered_in_one_go(web):
    """One connection gets no more than its share: it is closed after the first answer."""
    with connect(web) as connection:
        connection.sendall((HALF + b"\r\n") * 100)
        assert is_closed(connection)


def test_a_refusal_arrives_before_the_body_has_been_sent(web):
    """A client that sends a large body reads why it was refused; the rest is not parsed."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    body = b"[" * (32 * 1024 * 1024)
    with connect(web) as connection:
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
        opened = [silent.enter_context(connect(web)) for _ in range(40)]
        with connect(web) as plain, trusting.wrap_socket(plain, server_hostname="localhost") as own:
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
        measure(caller, 1.0)
        memory = Memory(pid)

        async def beside_attackers():
            attack, attacker = ATTACKS[name], caller if knows else stranger
            running = [asyncio.create_task(attack(attacker)) for _ in range(ATTACKERS)]
            times = await asyncio.to_thread(measure, caller, 2.0)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            return times

        times = asyncio.run(beside_attackers())
        assert times.failures == 0
        assert memory.growth < BOUND
