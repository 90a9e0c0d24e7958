"""Bounds of the bodies of requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from http import HTTPStatus

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from legato_client._errors import Unauthenticated
from legato_client.web import bodies as bodies_module
from legato_client.web.bodies import MAX_BODY_BYTES, MAX_VALUES, Bodies, JsonSize
from legato_client.web.errors import RejectedRequest
from legato_client.web.moondream_api import QueryBody
from starlette.requests import Request

from tests.clients.python.web.serving import CHAT, HELLO

QUESTION = json.dumps({"question": "why?"}).encode()


async def accepted():
    """Accept any token."""


async def refused():
    """Accept no token."""
    raise Unauthenticated("no")


def bodies_of(**limits: int) -> Bodies:
    """Bodies of callers whose tokens are accepted."""
    return Bodies(accepted, **limits)


def held_by(text: bytes) -> int:
    """The memory that a body in one piece stands for."""
    return round(JsonSize().add(text))


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
        assert (await read(bodies_of(), sent)).question == "why?"


async def test_a_large_body_is_not_read():
    """A length over the bound is refused before a byte is taken."""
    sent = Sent(QUESTION, length=len(QUESTION))
    with pytest.raises(RejectedRequest) as caught:
        await read(bodies_of(each=len(QUESTION) - 1), sent)
    assert caught.value.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    assert sent.taken == 0


async def test_a_body_of_unknown_length_is_read_to_the_bound():
    """Without a length, reading ends with the piece that passes the bound."""
    sent = Sent(*[b" "] * 100)
    with pytest.raises(RejectedRequest) as caught:
        await read(bodies_of(each=10), sent)
    assert caught.value.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    assert sent.taken == 11


@pytest.mark.parametrize("length", [None, len(QUESTION)])
async def test_all_bodies_together_are_bounded(length):
    """What bodies hold until they are answered is shared; a refused one may come back later."""
    bodies = bodies_of(together=2 * held_by(QUESTION))

    async with contextlib.AsyncExitStack() as held:
        for _ in range(2):
            sent = Sent(QUESTION, length=length)
            await held.enter_async_context(bodies.reading(sent.request, QueryBody))
        with pytest.raises(RejectedRequest) as caught:
            await read(bodies, Sent(QUESTION, length=length))
        assert caught.value.status == HTTPStatus.SERVICE_UNAVAILABLE
        assert caught.value.retry_after == 1.0
    for _ in range(3):
        assert (await read(bodies, Sent(QUESTION, length=length))).question == "why?"


async def test_a_refused_body_holds_nothing():
    """Memory of a body that is malformed, too large or of no accepted caller is given back."""
    bodies = bodies_of(each=50)
    for broken in (b"{", b" " * 60, b'{"question": 1}'):
        with pytest.raises(RejectedRequest):
            await read(bodies, Sent(broken))
        assert bodies.held == 0
    text = b" " * (50 - len(QUESTION)) + QUESTION
    async with bodies.reading(Sent(text).request, QueryBody):
        assert bodies.held == held_by(text)
    assert bodies.held == 0


async def test_no_byte_is_read_before_the_token_is_accepted():
    """A caller without an accepted token gets its refusal, whatever its body is."""
    sent = Sent(QUESTION)
    with pytest.raises(Unauthenticated):
        await read(Bodies(refused), sent)
    assert sent.taken == 0


async def test_an_announced_length_reserves_nothing():
    """Senders that announce much and send nothing leave the memory to others."""
    bodies = bodies_of(together=10 * held_by(QUESTION))
    loop = asyncio.get_running_loop()

    async def silent():
        sent = Sent(b"", length=MAX_BODY_BYTES - 1)
        request = Request(sent.request.scope, loop.create_future)
        async with bodies.reading(request, QueryBody):
            pass

    waiting = [asyncio.create_task(silent()) for _ in range(20)]
    await asyncio.sleep(0)
    assert (await read(bodies, Sent(QUESTION))).question == "why?"
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert bodies.held == 0


async def test_a_body_that_can_never_fit_is_not_told_to_come_back():
    """One that alone takes more than all may is too large, not unlucky."""
    with pytest.raises(RejectedRequest) as caught:
        await read(bodies_of(together=20), Sent(QUESTION))
    assert caught.value.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    assert caught.value.retry_after is None


@pytest.mark.parametrize(
    "text",
    [
        b'{"question": "x", "z": [' + b"[]," * MAX_VALUES,
        b'{"question": "x", "z": [' + b'"",' * MAX_VALUES,
        b"[" * (MAX_VALUES + 1),
        b'{"a":{},' * MAX_VALUES,
    ],
    ids=["arrays", "strings", "nesting", "objects"],
)
async def test_many_values_are_refused_before_they_are_parsed(text, monkeypatch):
    """Neither an ignored field nor another may hold more values than any request needs."""
    monkeypatch.setattr(msgspec.json, "decode", None)  # a call would be a TypeError
    pieces = [text[at : at + 1000] for at in range(0, len(text), 1000)]
    sent = Sent(*pieces)
    with pytest.raises(RejectedRequest, match=f"more than {MAX_VALUES}") as caught:
        await read(bodies_of(), sent)
    assert caught.value.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    assert sent.taken <= len(pieces)


@given(
    st.lists(
        st.sampled_from(
            [b'"', b"\\", b'\\"', b"u", b"\\u00e9", "\u00e9".encode(), b"a", b"[", b",", b":", b"{"]
        )
    ),
    st.lists(st.integers(0, 40)),
)
@example([b'"', b"\\", b"\\", b"u"], [3])  # an escaped backslash, and a plain letter
@example([b'"', b"\\", b"\\", b"\\", b"u"], [4])
def test_a_size_does_not_depend_on_how_a_body_is_cut(parts, cuts):
    """Strings, escapes and wide characters count the same in one piece and in many."""
    text = b"".join(parts)
    whole = JsonSize()
    expected = whole.add(text) if text else 0.0
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    cut = JsonSize()
    pieces = (text[start:end] for start, end in itertools.pairwise(ends))
    assert sum(cut.add(piece) for piece in pieces) == pytest.approx(expected)
    assert (cut.num_values, cut._in_string) == (whole.num_values, whole._in_string)


@given(
    st.recursive(
        st.none() | st.text() | st.integers(),
        lambda of: st.lists(of) | st.dictionaries(st.text(), of),
    )
)
def test_values_outside_of_strings_are_counted(value):
    """Brackets, commas and colons in strings are text."""
    size = JsonSize()
    size.add(json.dumps(value, ensure_ascii=False).encode())

    def count(of):
        if isinstance(of, dict):
            return 1 + sum(2 + count(each) for each in of.values()) + max(0, len(of) - 1)
        if isinstance(of, list):
            return 1 + sum(map(count, of)) + max(0, len(of) - 1)
        return int(isinstance(of, str))

    assert size.num_values == count(value)


def test_wide_text_counts_what_it_takes():
    """One character beyond ASCII can make four bytes of every character before and after it."""
    long = b'"' + b"a" * 10_000
    plain, wide = JsonSize(), JsonSize()
    assert plain.add(long) < 3 * len(long)
    assert wide.add(long) + wide.add("\u00e9".encode()) + wide.add(b"a" * 10_000) > 2 * 4 * 10_000


async def test_a_body_that_never_ends(monkeypatch):
    """A sender that stops is refused after a while."""
    monkeypatch.setattr("legato_client.web.bodies.READ_TIMEOUT", 0.01)
    sent = Sent(b"")

    async def never():
        return await asyncio.get_running_loop().create_future()

    request = Request(sent.request.scope, never)
    with pytest.raises(RejectedRequest) as caught:
        async with bodies_of().reading(request, QueryBody):
            pass
    assert caught.value.status == HTTPStatus.REQUEST_TIMEOUT


def test_the_largest_image_fits():
    """An image of the largest message of gRPC fits into a body, and not much more does."""
    largest = 32 * 1024 * 1024
    assert largest / 3 * 4 < MAX_BODY_BYTES < largest / 3 * 4 + 2 * 1024 * 1024


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_only_json_is_read(web, kind):
    """What a page of another origin may send without being asked first is refused."""
    body = json.dumps({"messages": HELLO}).encode()
    reply = web.send("POST", CHAT, body, {"content-type": kind})
    assert (reply.status, reply.error["type"]) == (415, "invalid_request_error")
    assert not web.fake.requests


def test_a_body_in_another_encoding_is_the_callers_fault(web):
    """A shell of Windows sends ISO 8859-1: the refusal says which byte is not UTF-8."""
    body = '{"question": "\u00bfqu\u00e9?"}'.encode("latin-1")
    reply = web.send("POST", "/v1/query", body, {"content-type": "application/json"})
    assert reply.status == 400
    assert "byte 14 is 0xbf" in reply.error["message"]
    assert not web.fake.requests


class Silent(Sent):
    """A request whose body stops after its first piece."""

    async def _receive(self):
        if self.taken:
            await asyncio.Event().wait()
        self.taken += 1
        return {"type": "http.request", "body": QUESTION[:-1], "more_body": True}


async def test_a_silent_body_ends_before_its_time_is_over(monkeypatch):
    """Without a byte for `SILENCE_TIMEOUT` it gives its memory back."""
    monkeypatch.setattr(bodies_module, "SILENCE_TIMEOUT", 0.05)
    bodies = bodies_of()
    with pytest.raises(RejectedRequest) as caught:
        await read(bodies, Silent())
    assert caught.value.status == HTTPStatus.REQUEST_TIMEOUT
    assert bodies.held == 0


async def test_silent_bodies_give_their_memory_to_others(monkeypatch):
    """The one that has been silent for longest ends first, and no more than are needed."""
    monkeypatch.setattr(bodies_module, "_SILENT", 0.0)
    bodies = bodies_of(together=2 * held_by(QUESTION[:-1]) + held_by(QUESTION) // 2)
    first = asyncio.create_task(read(bodies, Silent()))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(read(bodies, Silent()))
    await asyncio.sleep(0.01)
    assert (await read(bodies, Sent(QUESTION))).question == "why?"
    with pytest.raises(RejectedRequest, match="did not arrive"):
        await first
    assert not second.done()
    second.cancel()
    await asyncio.wait({second})
    assert bodies.held == 0
