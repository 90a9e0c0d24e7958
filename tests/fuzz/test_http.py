"""Damaged requests of every path, to a whole HTTP process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from http import HTTPStatus

import pytest
from legato_client import LegatoError
from legato_client.web import bodies, moondream_api
from legato_client.web.bodies import Bodies
from legato_client.web.errors import RejectedRequest
from legato_client.web.openai_api import ChatBody
from legato_client.web.responses_api import ResponsesBody
from msgspec import Struct
from starlette.requests import Request

from tests.clients.python.fake_server import FakeServer
from tests.clients.python.web.serving import PATIENCE, http_server
from tests.fuzz.mutation import mutate
from tests.fuzz.seeds import http_bodies

MUTANTS = 1500
SEED = 16
NO_OPERATOR = HTTPStatus.NOT_IMPLEMENTED  # the scripted server has no AdminService
TRACES = (b"Traceback", b"a bug of this HTTP server", b"Internal Server Error")


BODIES: dict[str, type[Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/v1/query": moondream_api.QueryBody,
    "/v1/caption": moondream_api.CaptionBody,
    "/v1/detect": moondream_api.DetectBody,
    "/v1/point": moondream_api.PointBody,
    "/v1/segment": moondream_api.SegmentBody,
}
_loop = asyncio.new_event_loop()


def body_to_task(data: bytes) -> None:
    """Read a body of the path that the first byte names, in two pieces, and convert it."""
    if len(data) > 1:
        with contextlib.suppress(RejectedRequest, LegatoError):
            _loop.run_until_complete(_body_to_task(data))


async def _body_to_task(data: bytes) -> None:
    kind, cut = list(BODIES.values())[data[0] % len(BODIES)], data[1]
    pieces = [data[2 : 2 + cut], data[2 + cut :]]

    async def receive():
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def accept():
        """Accept any token."""

    headers = [(b"content-type", b"application/json")]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    async with Bodies(accept).reading(request, kind) as body:
        if isinstance(body, ChatBody | ResponsesBody):
            await body.asked().task()
        elif isinstance(body, moondream_api.Question):
            body.task()
            if body.image_url is not None:
                await bodies.decoded(body.image_url, "image_url")


def body_seeds() -> list[bytes]:
    """What `body_to_task` reads, undamaged."""
    documents = http_bodies()
    return [
        bytes((number, 200)) + json.dumps(body).encode()
        for number, path in enumerate(BODIES)
        for body in documents[path]
    ]


def test_damaged_bodies_are_converted_or_refused():
    """Of 5,000 mutants none ends otherwise; the undamaged ones are converted."""
    chance, seeds = random.Random(SEED), body_seeds()
    for seed in seeds:
        _loop.run_until_complete(_body_to_task(seed))
    for number in range(5000):
        body_to_task(mutate(seeds[number % len(seeds)], chance))


@pytest.fixture(scope="module", params=[False, True], ids=["http", "playground"])
def address(request):
    """Host and port of `legato http`, or of the playground, before a scripted server."""
    with FakeServer() as fake, http_server(fake.target, page=request.param) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        yield host, int(port)


def requests():
    """Whole requests, by what they ask for."""
    for path, documents in http_bodies().items():
        for body in documents:
            yield from _requests(path, body)
    for path in ("/healthz", "/readyz", "/openapi.json", "/v1/models", "/v1/models/fake", "/"):
        yield f"GET {path} HTTP/1.1\r\nHost: localhost\r\n", b""
    socket_head = (
        "GET /playground/session HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n"
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    )
    yield socket_head, b"\x81\x82\x00\x00\x00\x00{}"


def _requests(path, body):
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    yield (
        (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Legato-Timeout: 5\r\nAuthorization: Bearer x\r\nContent-Length: {len(sent)}\r\n"
        ),
        sent,
    )


def answer(address, request):
    """The status of the first answer, or None where the connection ends without one."""
    with socket.create_connection(address, timeout=PATIENCE) as connection:
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            said = b""
            while len(said) < 64 * 1024 and (piece := connection.recv(64 * 1024)):
                said += piece
                if b"\r\n\r\n" in said and b" 101 " in said[:20]:
                    break
        except ConnectionError:
            return None, b""
    words = said.split(b" ", 2)
    return (int(words[1]) if len(words) > 1 else None), said


@pytest.mark.timeout(600)
def test_damaged_requests_end_with_a_typed_answer(address):
    """Of 1,500 mutants of heads and bodies none is called a fault of this process."""
    chance = random.Random(SEED)
    seeds = list(requests())
    ends: dict[int | None, int] = {}
    for number in range(MUTANTS):
        head, body = seeds[number % len(seeds)]
        if number % 3 == 0:  # else the body, whose length stays true
            request = mutate(f"{head}\r\n".encode() + body, chance)
        else:
            damaged = mutate(body or b"{}", chance)
            head = head.replace(f"Content-Length: {len(body)}", f"Content-Length: {len(damaged)}")
            request = f"{head}Connection: close\r\n\r\n".encode() + damaged
        status, said = answer(address, request)
        assert status is None or status < 500 or status == NO_OPERATOR, (request, said)
        assert not any(trace in said for trace in TRACES), (request, said)
        ends[status] = ends.get(status, 0) + 1
    assert ends[HTTPStatus.OK] > MUTANTS // 50
    assert ends[HTTPStatus.BAD_REQUEST] > MUTANTS // 20
    status, _ = answer(address, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert status == HTTPStatus.OK
