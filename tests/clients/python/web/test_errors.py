"""Failures as HTTP answers."""

from __future__ import annotations

import json
import socket

import grpc
import openai
import pytest
from google.rpc import error_details_pb2
from legato_client import _errors
from legato_client.web import errors
from starlette.requests import Request

from tests.clients.python.failures import failure, retry_info
from tests.clients.python.web.serving import CHAT, HELLO

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
