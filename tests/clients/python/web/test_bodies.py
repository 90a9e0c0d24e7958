"""Bounds of the bodies of requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from http import HTTPStatus

import pytest
from legato_client.web.bodies import MAX_BODY_BYTES, Bodies
from legato_client.web.errors import Refused
from legato_client.web.moondream_api.bodies import QueryBody
from starlette.requests import Request

from tests.clients.python.web.serving import CHAT, HELLO

QUESTION = json.dumps({"question": "why?"}).encode()


class Sent:
    """A request that arrives in these pieces, and counts those that were taken."""

    def __init__(self, *pieces: bytes, length: int | None = None) -> None:
        self._pieces = list(pieces)
        self.taken = 0
        headers = [(b"content-type", b"application/json; charset=utf-8")]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
        self.request = Request(scope, self._receive)

    async def _receive(self):
        piece = self._pieces[self.taken]
        self.taken += 1
        return {
            "type": "http.request",
            "body": piece,
            "more_body": self.taken < len(self._pieces),
        }


async def read(bodies: Bodies, sent: Sent) -> QueryBody:
    """The whole body."""
    async with bodies.reading(sent.request, QueryBody) as body:
        return body


async def test_a_body_in_pieces():
    """A body is read whole, with or without its length."""
    for length in (None, len(QUESTION)):
        sent = Sent(QUESTION[:3], QUESTION[3:], length=length)
        assert (await read(Bodies(), sent)).question == "why?"


async def test_a_large_body_is_not_read():
    """A length over the bound is refused before a byte is taken."""
    sent = Sent(QUESTION, length=len(QUESTION))
    with pytest.raises(Refused) as caught:
        await read(Bodies(each=len(QUESTION) - 1), sent)
    assert caught.value.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    assert sent.taken == 0


async def test_a_body_of_unknown_length_is_read_to_the_bound():
    """Without a length, reading ends with the piece that passes the bound."""
    sent = Sent(*[b" "] * 100)
    with pytest.raises(Refused) as caught:
        await read(Bodies(each=10), sent)
    assert caught.value.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    assert sent.taken == 11


@pytest.mark.parametrize("length", [None, len(QUESTION)])
async def test_all_bodies_together_are_bounded(length):
    """What bodies hold until they are answered is shared; a refused one may come back later."""
    bodies = Bodies(together=2 * len(QUESTION))

    async with contextlib.AsyncExitStack() as held:
        for _ in range(2):
            sent = Sent(QUESTION, length=length)
            await held.enter_async_context(bodies.reading(sent.request, QueryBody))
        with pytest.raises(Refused) as caught:
            await read(bodies, Sent(QUESTION, length=length))
        assert caught.value.status == HTTPStatus.SERVICE_UNAVAILABLE
        assert caught.value.retry_after == 1.0
    for _ in range(3):
        assert (await read(bodies, Sent(QUESTION, length=length))).question == "why?"


async def test_a_refused_body_holds_nothing():
    """Bytes of a body that is malformed or too large are given back."""
    bodies = Bodies(each=50, together=50)
    for broken in (b"{", b" " * 60, b'{"question": 1}'):
        with pytest.raises(Refused):
            await read(bodies, Sent(broken))
    async with bodies.reading(Sent(b" " * (50 - len(QUESTION)) + QUESTION).request, QueryBody):
        assert bodies._held == 50
    assert bodies._held == 0


async def test_a_body_that_never_ends(monkeypatch):
    """A sender that stops is refused after a while."""
    monkeypatch.setattr("legato_client.web.bodies.READ_TIMEOUT", 0.01)
    sent = Sent(b"")

    async def never():
        return await asyncio.get_running_loop().create_future()

    request = Request(sent.request.scope, never)
    with pytest.raises(Refused) as caught:
        async with Bodies().reading(request, QueryBody):
            pass
    assert caught.value.status == HTTPStatus.REQUEST_TIMEOUT


def test_the_largest_picture_fits():
    """A picture of the largest message of gRPC fits into a body, and not much more does."""
    largest = 32 * 1024 * 1024
    assert largest / 3 * 4 < MAX_BODY_BYTES < largest / 3 * 4 + 2 * 1024 * 1024


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_only_json_is_read(web, kind):
    """What a page of another origin may send without being asked first is refused."""
    body = json.dumps({"messages": HELLO}).encode()
    reply = web.send("POST", CHAT, body, {"content-type": kind})
    assert (reply.status, reply.error["type"]) == (415, "invalid_request_error")
    assert not web.fake.requests
