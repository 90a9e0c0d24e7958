"""Streams and calls whose reader leaves, and streams that break."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading

import grpc
import openai
import pytest
from legato_client.web import streams
from legato_client.web.errors import ReaderLeft

from tests.clients.python.failures import failure
from tests.clients.python.fake_server import STREAMS
from tests.clients.python.until import until
from tests.clients.python.web.serving import CHAT, DATA_URL, HELLO, PATIENCE, connect

QUEUED, STARTED, THOUGHT, TEXT, *_ = STREAMS["query"]


@pytest.fixture
def held(web):
    """A stream that stops in its middle until it is set, which the end of the test does."""
    event = threading.Event()
    web.fake.script["Generate"].append([QUEUED, STARTED, THOUGHT, TEXT, event])
    yield event
    event.set()


@pytest.mark.usefixtures("held")
def test_leaving_a_stream_cancels_the_call(web, client):
    """When the reader closes a stream that has begun, the server's call is cancelled."""
    stream = client.chat.completions.create(model="m", messages=HELLO, stream=True)
    next(iter(stream))
    assert not web.fake.stream_ended.is_set()
    stream.close()
    assert web.fake.stream_ended.wait(PATIENCE)
    assert web.fake.num_completed == 0


def test_leaving_before_the_answer_cancels_the_call(web):
    """When the reader leaves while its request waits, the server's call is cancelled."""
    event = threading.Event()
    web.fake.script["Generate"].append([QUEUED, event])
    try:
        with contextlib.closing(connect(web.url)) as connection:
            body = json.dumps({"messages": HELLO, "stream": True})
            connection.request("POST", CHAT, body, {"content-type": "application/json"})
            until(lambda: web.fake.count("Generate"))
            assert not web.fake.stream_ended.is_set()
        assert web.fake.stream_ended.wait(PATIENCE)
    finally:
        event.set()


async def test_work_ends_with_its_reader():
    """The work is cancelled, and has ended, when the disconnection is reported."""
    ended = []

    async def receive():
        return {"type": "http.disconnect"}

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(ReaderLeft):
        await streams.cancel_on_disconnect(receive, work())
    assert ended == [True]


def test_a_broken_stream_raises_in_openais_client(web, client):
    """A failure after the first event is an error of the client, with the reason of the server."""
    broken = failure(grpc.StatusCode.INTERNAL, "NUMERIC")
    web.fake.script["Generate"].append([QUEUED, STARTED, THOUGHT, TEXT, broken])
    stream = client.chat.completions.create(model="m", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError) as caught:
        list(stream)
    assert caught.value.code == "numeric"


def test_a_broken_stream_is_cut(web):
    """A reader that knows no errors inside a stream does not take its part for the whole."""
    caption = STREAMS["caption"]
    broken = failure(grpc.StatusCode.INTERNAL, "NUMERIC")
    web.fake.script["Generate"].append([*caption[:3], broken])
    with pytest.raises(http.client.IncompleteRead) as caught:
        web.post("/v1/caption", {"image_url": DATA_URL, "stream": True})
    *_, last = caught.value.partial.split(b"data: ")
    assert json.loads(last)["error"]["code"] == "numeric"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("headers", "most"),
    [
        ({"Legato-Timeout": "20"}, 20),
        ({"Legato-Timeout": "1e9"}, PATIENCE),
        ({"X-Stainless-Read-Timeout": "20"}, 20),
        ({"Legato-Timeout": "20", "X-Stainless-Read-Timeout": "10"}, 20),
        ({}, PATIENCE),
    ],
)
def test_the_callers_deadline(web, headers, most, stream):
    """The server is told how long the caller waits; a stream of OpenAI's has no such time."""
    if stream and "Legato-Timeout" not in headers:
        most = PATIENCE
    assert web.post(CHAT, {"messages": HELLO, "stream": stream}, headers).status == 200
    left = round(web.fake.time_left)  # gRPC sends coarse times
    assert left <= most
    assert (left <= 20) == (most == 20)


def test_a_deadline_that_passes(web):
    """A call that takes longer than its caller waits is 504."""
    event = threading.Event()
    web.fake.script["Generate"].append([QUEUED, event])
    try:
        reply = web.post(CHAT, {"messages": HELLO, "stream": True}, {"Legato-Timeout": "0.1"})
        assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
    finally:
        event.set()


@pytest.mark.parametrize("seconds", ["soon", "0", "-1", "nan"])
def test_a_deadline_that_is_none(web, seconds):
    """A malformed deadline is refused, not ignored."""
    reply = web.post("/v1/query", {"question": "?"}, {"Legato-Timeout": seconds})
    assert (reply.status, reply.error["param"]) == (400, "legato-timeout")
    assert not web.fake.requests
