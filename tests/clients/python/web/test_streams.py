"""Streams whose reader leaves or that break, and the live timeline over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import shutil
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc
import openai
import pytest
from legato_client import AsyncClient, DecodeSteps, TimelineSpan, TimelineUpdate
from legato_client._errors import LegatoError, PermissionDenied
from legato_client.web import errors, streams, timeline
from legato_client.web.errors import ReaderLeft
from legato_client.web.server import Backend
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from tests.clients.python.face import until
from tests.clients.python.fake_server import STREAMS, failure
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


# ---------------------------------------------------------------- timeline

STATIC = Path(timeline.__file__).parent / "static"
STEPS = DecodeSteps(9, 20, 2.0, 5.0, 4.0, 0.5, 0.5, 3.0, 0.25, 6.0, 0.0, 0.25, 0.125)


def span(lane, name, start, duration, launch=7):
    """Return a span of a decode; times in microseconds."""
    return TimelineSpan(
        lane, name, start / 1e6, duration / 1e6, launch, "decode", 3, 1, 2, engine=1, tokens=4
    )


UPDATE = TimelineUpdate(
    spans=(
        span("cpu plan", "plan", 1000, 50),
        span("device compute", "forward", 1200.5, 700),
        span("device idle", "idle", 1900.5, 20),
        span("slot 1", "held", 1050, 1000),
        span("cpu commit", "commit", 2500, 30, launch=8),
        span("cpu commit", "of a later server", 2600, 30, launch=8),
    ),
    decode_steps=STEPS,
    engine=1,
    engine_started=0.5,
    lost_launches=6,
    pipeline_depth=2,
    depth_switch=True,
)
FIRST = TimelineUpdate(spans=(), decode_steps=None, depth_switch=True)


class FakeClient:
    """Yields what it is given, and raises the errors in it."""

    def __init__(self, *updates):
        self.updates = updates
        self.depths = []
        self.watching = 0

    async def watch_timeline(self, seconds):
        """End after the updates; wait for ever at None."""
        self.watching += 1
        try:
            for each in self.updates:
                if isinstance(each, LegatoError):
                    raise each
                if each is None:
                    await asyncio.Event().wait()
                yield each
        finally:
            self.watching -= 1

    async def server_info(self, **_):
        """Accept any token."""

    async def set_pipeline_depth(self, depth):
        """Keep it."""
        self.depths.append(depth)


def browser(client, operator=lambda: ""):
    """Return a browser on an application of these routes alone."""

    @contextlib.asynccontextmanager
    async def lifespan(_app):
        yield {"backend": Backend.of(lambda: client, 60.0)}

    app = Starlette(
        routes=timeline.routes(operator),
        lifespan=lifespan,
        exception_handlers=dict.fromkeys(
            (LegatoError, errors.RejectedRequest), errors.on_legato_error
        ),
    )
    return TestClient(app)


def events(text):
    """Parse a stream of events."""
    return [json.loads(each.removeprefix("data: ")) for each in text.split("\n\n") if each]


def refused():
    """What a caller without the scope gets."""
    return PermissionDenied("needs admin", reason="FORBIDDEN")


def test_launches_come_whole():
    """A launch is one entry with its spans; names that this page cannot know are left out."""
    client = FakeClient(FIRST, UPDATE)
    with browser(client) as page:
        response = page.get("/timeline/events")
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-store"
    first, second = events(response.text)
    assert (first["launches"], first["steps"], first["switch"]) == ([], None, True)
    assert (second["engine"], second["started"], second["lost"]) == (1, 500_000, 6)
    assert second["depth"] == 2
    assert second["steps"]["predicted_gain"] == 0.25
    assert second["launches"] == [
        [7, "decode", 1, 3, 1, 2, 4, 1000, [0, 0, 50, 5, 200.5, 700, 8, 900.5, 20, 9, 50, 1000]],
        [8, "decode", -1, 3, 1, 2, 4, 2500, [4, 0, 30]],
    ]
    assert client.watching == 0


def test_a_refusal_is_an_answer_and_a_later_failure_an_event():
    """So that a page can tell why it sees nothing."""
    with browser(FakeClient(refused())) as page:
        response = page.get("/timeline/events")
    assert response.status_code == 403
    assert response.json()["error"]["message"] == "needs admin"
    client = FakeClient(FIRST, refused())
    with browser(client) as page:
        _, last = events(page.get("/timeline/events").text)
    assert last == {"error": {"message": "needs admin", "code": "PERMISSION_DENIED"}}
    assert client.watching == 0


async def test_a_silent_stream_has_comments_and_ends_with_its_page(monkeypatch):
    """The server is watched no longer once the page has left."""
    monkeypatch.setattr(timeline, "SILENCE", 0.0)
    client = FakeClient(FIRST, None)
    backend = Backend.of(lambda: cast(AsyncClient, client), 60.0)
    request = SimpleNamespace(state=SimpleNamespace(backend=backend))
    (route,) = timeline.routes(None)
    assert isinstance(route, Route)
    stream = (await route.endpoint(request)).body_iterator
    found = [await anext(stream) for _ in range(4)]
    assert client.watching == 1
    assert found[-1] == timeline.QUIET
    assert sum(each != timeline.QUIET for each in found) == 1
    await stream.aclose()
    assert client.watching == 0


def test_the_depth_is_set():
    """Only by a request that no form of another page can make, and only to 1 or 2."""
    client = FakeClient()
    with browser(client) as page:
        assert page.post("/timeline/depth", json={"depth": 1}).json() == {"depth": 1}
        for wrong in ({"depth": 3}, {"depth": True}, {"depth": 1.0}, {"depth": "1"}, {}, [1]):
            assert page.post("/timeline/depth", json=wrong).status_code == 400
        headers = {"content-type": "text/plain"}
        assert page.post("/timeline/depth", content='{"depth": 2}', headers=headers).is_error
        long = json.dumps({"depth": 2, "more": " " * 2000})
        headers = {"content-type": "application/json"}
        assert page.post("/timeline/depth", content=long, headers=headers).status_code == 413
    assert client.depths == [1]


def test_the_switch_can_be_left_out():
    """Then a page is not offered it either."""
    with browser(FakeClient(UPDATE), None) as page:
        assert page.post("/timeline/depth", json={"depth": 1}).status_code == 404
        assert [each["switch"] for each in events(page.get("/timeline/events").text)] == [False]


def test_the_page_knows_the_same_names():
    """Events give them as indices."""
    text = (STATIC / "timeline-store.js").read_text()
    names = text.partition("export const NAMES = [")[2].partition("]")[0]
    assert tuple(json.loads(f"[{names.strip().rstrip(',')}]")) == timeline.NAMES


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's module in Node.js")
def test_the_page_keeps_the_latest_launches():
    """Its memory is bounded; what came first goes first, and marks tell of losses."""
    message = timeline.document(UPDATE)
    done = subprocess.run(
        ["node", str(Path(__file__).with_name("store.mjs")), str(STATIC), json.dumps(message)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
