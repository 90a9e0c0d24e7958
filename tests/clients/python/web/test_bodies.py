"""Bounds of the bodies of requests, and failures as HTTP answers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from http import HTTPStatus

import grpc
import msgspec
import openai
import pytest
from google.rpc import error_details_pb2
from hypothesis import example, given, settings
from hypothesis import strategies as st
from legato_client import _errors
from legato_client._errors import Unauthenticated
from legato_client.web import bodies as bodies_module
from legato_client.web import errors
from legato_client.web.bodies import MAX_BODY_BYTES, MAX_VALUES, Bodies, JsonSize
from legato_client.web.errors import RejectedRequest
from legato_client.web.moondream_api import QueryBody
from starlette.requests import Request

from tests.clients.python.fake_server import failure, retry_info
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


@settings(max_examples=40)
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


class Trickling(Sent):
    """A request whose body has a byte every hundredth of a second after its first piece."""

    async def _receive(self):
        if self.taken:
            await asyncio.sleep(0.01)
        self.taken += 1
        piece = b" " if self.taken > 1 else QUESTION[:-1]
        return {"type": "http.request", "body": piece, "more_body": True}


async def test_a_trickling_body_gives_its_memory_to_others(monkeypatch):
    """A byte now and then does not count as progress."""
    monkeypatch.setattr(bodies_module, "_SILENT", 0.1)
    bodies = bodies_of(together=held_by(QUESTION) * 3 // 2)
    trickling = asyncio.create_task(read(bodies, Trickling()))
    await asyncio.sleep(0.3)
    assert (await read(bodies, Sent(QUESTION))).question == "why?"
    with pytest.raises(RejectedRequest, match="did not arrive"):
        await trickling


async def test_large_bodies_take_turns_in_small_steps():
    """While one is received, other work runs between its parts, and other large bodies wait."""
    large = QUESTION + b" " * 2**20
    bodies = bodies_of()
    reading = [asyncio.create_task(read(bodies, Sent(large))) for _ in range(4)]
    held, most = 0, 0
    while not all(each.done() for each in reading):
        await asyncio.sleep(0)
        most, held = max(most, bodies.held - held), bodies.held
    assert most <= held_by(large) // 16


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


# ---------------------------------------------------------------- errors

STATUSES = {  # as google.rpc.Code documents them
    "CANCELLED": 499,
    "UNKNOWN": 500,
    "INVALID_ARGUMENT": 400,
    "DEADLINE_EXCEEDED": 504,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "PERMISSION_DENIED": 403,
    "RESOURCE_EXHAUSTED": 429,
    "FAILED_PRECONDITION": 400,
    "ABORTED": 409,
    "OUT_OF_RANGE": 400,
    "UNIMPLEMENTED": 501,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DATA_LOSS": 500,
    "UNAUTHENTICATED": 401,
}
RAISED = {  # by OpenAI's client
    "INVALID_ARGUMENT": openai.BadRequestError,
    "NOT_FOUND": openai.NotFoundError,
    "PERMISSION_DENIED": openai.PermissionDeniedError,
    "RESOURCE_EXHAUSTED": openai.RateLimitError,
    "ABORTED": openai.ConflictError,
    "UNAUTHENTICATED": openai.AuthenticationError,
    "INTERNAL": openai.InternalServerError,
    "UNAVAILABLE": openai.InternalServerError,
}
QUERY = {"question": "why?"}


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code.name != "OK"])
def test_each_status_of_grpc(web, code):
    """Every status of gRPC is answered with HTTP's of the same meaning, and the request's id."""
    # UNAVAILABLE is repeated by gRPC, as the contract says.
    web.fake.script["Query"].extend([failure(code, "")] * 10)
    reply = web.post("/v1/query", QUERY)
    assert reply.status == STATUSES[code.name]
    assert reply.error["code"] == code.name.lower()
    assert reply.headers["x-request-id"] == "r-9"


KINDS = [
    each
    for each in vars(_errors).values()
    if isinstance(each, type) and issubclass(each, _errors.LegatoError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_each_class_of_failures(kind):
    """Each class of the client's failures has the status of its code, and a kind of OpenAI's."""
    error = kind("no")
    assert errors.status_of(error) == STATUSES[error.code]
    assert errors.document_of(error).error.type.endswith("error")


@pytest.mark.parametrize("code", RAISED)
def test_what_openais_client_raises(web, client, code):
    """OpenAI's client raises its own class for a failure, with the server's reason as its code."""
    refusal = failure(getattr(grpc.StatusCode, code), "SOME_REASON")
    web.fake.script["Query"].extend([refusal] * 10)
    with pytest.raises(RAISED[code]) as caught:
        client.chat.completions.create(model="m", messages=HELLO)
    assert (caught.value.code, caught.value.request_id) == ("some_reason", "r-9")


def test_the_field_that_is_wrong(web):
    """The first field that the server names is the error's param, by its name in the body."""
    violation = error_details_pb2.BadRequest.FieldViolation(field="task.sampling.top_p")
    bad = error_details_pb2.BadRequest(field_violations=[violation])
    web.fake.script["Query"].append(failure(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", bad))
    reply = web.post("/v1/query", QUERY)
    assert (reply.error["param"], reply.error["type"]) == (
        "top_p",
        "invalid_request_error",
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/query", {}, "question"),
        ("/v1/query", {"question": 5}, "question"),
        ("/v1/query", {**QUERY, "settings": {"max_tokens": 0}}, "settings.max_tokens"),
        ("/v1/query", {**QUERY, "settings": {"tempo": 1}}, "settings.tempo"),
        ("/v1/point", {"image_url": "", "object": "x", "spatial_refs": [[1]]}, "spatial_refs[0]"),
        (CHAT, {"messages": HELLO, "max_tokens": "many"}, "max_tokens"),
        (CHAT, {"messages": [*HELLO, {"role": "robot"}]}, "messages[1].role"),
        (CHAT, {"messages": HELLO, "misspelt": 1}, "misspelt"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (CHAT, [], None),
    ],
)
def test_the_member_that_is_invalid(web, path, body, param):
    """A body that is not of the operation's form is refused with the member that is wrong."""
    reply = web.post(path, body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert not web.fake.requests


def test_what_is_no_http_is_refused_in_the_same_form(web):
    """Also what the router never sees is a document."""
    host, _, port = web.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nbroken\r\n\r\n")
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "bad_request"


def test_a_large_image(web):
    """An image over the server's limit is 413, not any wrong request."""
    web.fake.script["Query"].append(
        failure(grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_TOO_LARGE", limit="1", actual="2")
    )
    assert web.post("/v1/query", QUERY).status == 413


@pytest.mark.parametrize(
    ("code", "reason", "repeated"),
    [
        ("RESOURCE_EXHAUSTED", "QUEUE_FULL", True),
        ("UNAVAILABLE", "DRAINING", True),
        ("INTERNAL", "POISONED", False),
        ("INTERNAL", "INTERNAL", False),
        ("ABORTED", "PREEMPTED", False),
        ("ALREADY_EXISTS", "DUPLICATE_REQUEST", False),
        ("DEADLINE_EXCEEDED", "", False),
    ],
)
def test_what_openais_client_may_repeat(web, code, reason, repeated):
    """A request that ends engines, or that an operator stopped, is not sent again by itself."""
    refusal = failure(getattr(grpc.StatusCode, code), reason)
    web.fake.script["Generate"].append([refusal])
    body = {"messages": HELLO, "stream": True}
    assert web.post(CHAT, body).headers.get("x-should-retry") == (None if repeated else "false")


def test_when_to_come_back(web):
    """The server's RetryInfo is Retry-After, in whole seconds and never earlier."""
    refusal = failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_info(0.25))
    web.fake.script["Generate"].append([refusal])
    reply = web.post(CHAT, {"messages": HELLO, "stream": True})
    assert (reply.status, reply.headers["retry-after"]) == (429, "1")


def test_the_router_refuses_in_the_same_form(web):
    """An unknown path and another method are documents of the same form."""
    assert web.get("/v1/nothing").error["code"] == "not_found"
    reply = web.get(CHAT)
    assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"


async def test_a_bug_tells_nothing():
    """An exception that nobody foresaw is 500 without its text, and not to be repeated."""
    request = Request({"type": "http", "method": "GET", "path": "/", "headers": []})
    response = await errors.on_bug(request, RuntimeError("secret"))
    assert (response.status_code, response.headers["x-should-retry"]) == (500, "false")
    assert b"secret" not in response.body
