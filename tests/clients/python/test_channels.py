"""Channels of a client: connections, affinity, and streams that continue with another server."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import grpc.aio
import pytest
from legato.v1 import (
    image_pb2,
    inference_pb2,
    inference_pb2_grpc,
    media_pb2,
    server_pb2,
    server_pb2_grpc,
    session_pb2,
    task_pb2,
)
from legato_client import (
    AsyncClient,
    CaptionTask,
    Finished,
    InternalError,
    NotFound,
    Options,
    QueryTask,
    RawFrame,
    Started,
    TextDelta,
    Unavailable,
)
from legato_client._grpc import channel, transport
from legato_client._images.sources import to_image
from legato_client._proto.requests import Upload
from legato_engine.images import decoding
from legato_engine.images.raw import row_bytes
from legato_engine.types import BlobRef, PixelFormat, RawImage

from tests.clients.python.fake_server import INFO, Failure, failure, retry_info

PATIENCE = 60.0  # seconds
LIMIT = transport.CALLS_PER_CHANNEL
MANY = 2 * LIMIT + 1


class Held(inference_pb2_grpc.InferenceServiceServicer, server_pb2_grpc.ServerServiceServicer):
    """Begins every stream, and ends none until the test does."""

    def Query(self, *_):
        """Do nothing: as all below, it is not called."""

    Caption = Detect = Point = Segment = RunTasks = ListModels = Query

    def __init__(self):
        self.may_end = asyncio.Event()
        self.peers = set()

    async def Generate(self, _request, context):
        """Begin, wait, end."""
        self.peers.add(context.peer())
        started = inference_pb2.Started(request_id="r", model="fake", input_tokens=1)
        yield inference_pb2.GenerateResponse(index=0, started=started)
        await self.may_end.wait()
        finished = inference_pb2.Finished(info=INFO)
        finished.result.caption.caption = "a cat"
        yield inference_pb2.GenerateResponse(index=1, finished=finished)

    async def GetServerInfo(self, _request, _context):
        """Answer at once."""
        return server_pb2.GetServerInfoResponse(name="legato")


@contextlib.asynccontextmanager
async def serving():
    """A server that begins as many calls of a connection as a channel carries."""
    server = grpc.aio.server(options=[("grpc.max_concurrent_streams", LIMIT)])
    held = Held()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(held, server)
    server_pb2_grpc.add_ServerServiceServicer_to_server(held, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield held, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.timeout(120)
async def test_every_stream_begins():
    """More streams than a server begins on one connection, and a call beside them, all begin."""
    async with serving() as (held, target), AsyncClient(target, token="") as client:
        begun = asyncio.Semaphore(0)

        async def read():
            async for event in client.generate(None, CaptionTask(), timeout=PATIENCE):
                if isinstance(event, Started):
                    begun.release()

        readers = [asyncio.create_task(read()) for _ in range(MANY)]
        for _ in readers:
            await asyncio.wait_for(begun.acquire(), PATIENCE)
        assert (await client.server_info(timeout=PATIENCE)).name == "legato"
        assert len(held.peers) == 3
        held.may_end.set()
        await asyncio.gather(*readers)
        assert [each.num_calls for each in client._connection._channels] == [0, 0, 0]
        for _ in range(3):
            async for _event in client.generate(None, CaptionTask(), timeout=PATIENCE):
                pass
        assert len(held.peers) == 3


async def test_two_clients_have_connections_of_their_own():
    """The calls of one client are not limited by those of another one of the same process."""
    async with serving() as (held, target):
        held.may_end.set()
        for _ in range(2):
            async with AsyncClient(target, token="") as client:
                async for _event in client.generate(None, CaptionTask(), timeout=PATIENCE):
                    pass
        assert len(held.peers) == 2


async def test_calls_that_end_early_make_room():
    """Streams that are closed, cancelled or refused count no longer."""
    async with serving() as (_held, target), AsyncClient(target, token="") as client:
        for _ in range(3):
            events = client.generate(None, CaptionTask(), timeout=PATIENCE)
            await anext(events)
            await events.aclose()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    async for _event in client.generate(None, CaptionTask(), timeout=PATIENCE):
                        pass
        assert [each.num_calls for each in client._connection._channels] == [0]


# ---------------------------------------------------------------- affinity
# The metadata that keeps calls about one image, or of one session, on one server.

HELD = media_pb2.Image(image_id="img_1")


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (inference_pb2.DetectRequest(image=HELD), "img_1"),
        (inference_pb2.GenerateRequest(image=HELD), "img_1"),
        (image_pb2.DeleteImageRequest(image_id="img_1"), "img_1"),
        (session_pb2.SessionOpen(session_name="arm 7\n"), "arm%207%0A"),
        (session_pb2.SessionOpen(), ""),
        (inference_pb2.QueryRequest(question="why?"), ""),
        (inference_pb2.DetectRequest(image=to_image(b"jpeg")), ""),
    ],
)
def test_what_names_a_server(request_, expected):
    """An image id or a session's name, as printable ASCII; other calls go anywhere."""
    assert channel.of(request_) == expected


def test_an_uploads_id_is_known_before_it_is_sent():
    """The client derives the id of a file as the engine does."""
    assert Upload.of(to_image(b"jpeg"), None).image_id == decoding.image_id(
        decoding.content_key(b"jpeg")
    )


@pytest.mark.parametrize("form", list(PixelFormat))
@pytest.mark.parametrize("stride", [0, 64])
def test_pixels_have_the_engines_id_too(form, stride):
    """In every format, with padded rows or none."""
    frame = RawFrame(bytes(64 * 3), 2, 2, form.value, stride)
    raw = RawImage(
        blob=BlobRef(name="", size=0),
        width=2,
        height=2,
        row_stride=stride or row_bytes(form, 2),
        format=form,
    )
    upload = Upload.of(to_image(frame), None)
    assert upload.image_id == decoding.image_id(decoding.content_key(upload.data, raw))


# ---------------------------------------------------------------- resumption
# Streams that go on with another server: what is asked, and what the caller sees.

IMAGE = b"\x89PNG\r\n\x1a\n" + bytes(16)
LOST = Failure(grpc.StatusCode.UNAVAILABLE)


@pytest.fixture
def soon(monkeypatch):
    """Delays that tests need not wait for."""
    monkeypatch.setattr(transport, "_DELAYS", (0.001,) * 3)


def stream(*rows):
    return [
        inference_pb2.GenerateResponse(index=index, checkpoint=checkpoint, **{name: body})
        for index, (name, body, checkpoint) in enumerate(rows)
    ]


def started(**fields):
    return (
        "started",
        inference_pb2.Started(request_id="r-1", model="fake", input_tokens=7),
        inference_pb2.Checkpoint(model="fake", seed=3, **fields),
    )


def text(word, *token_ids):
    checkpoint = inference_pb2.Checkpoint(token_ids=token_ids) if token_ids else None
    return ("text", inference_pb2.TextDelta(text=word), checkpoint)


def finished(answer):
    result = task_pb2.TaskResult(query=task_pb2.QueryResult(answer=answer))
    return ("finished", inference_pb2.Finished(result=result, info=INFO), None)


def words(events):
    return [event.text for event in events if isinstance(event, TextDelta)]


@pytest.mark.usefixtures("soon")
def test_a_lost_stream_goes_on_with_its_checkpoints(client, server):
    """The next server is given all tokens; nothing is told twice, what was uncovered again."""
    server.script["Generate"] += [
        [*stream(started(), text("one", 1, 2), text(" two", 3), text(" uncovered")), LOST],
        [*stream(started(resumptions=1), text(" three", 4)), LOST],
        stream(started(resumptions=2), text(" four", 5), finished("one two three four")),
    ]
    events = client.generate(IMAGE, QueryTask("?"), options=Options(request_id="mine"))
    assert words(events) == ["one", " two", " three", " four"]
    assert [type(event) for event in events].count(Started) == 1
    assert isinstance(events[-1], Finished)
    first, second, third = (each for name, each, _ in server.requests if name == "Generate")
    assert first.checkpoints
    assert not first.HasField("resume_from")
    assert second.resume_from == inference_pb2.Checkpoint(model="fake", seed=3, token_ids=[1, 2, 3])
    assert third.resume_from.token_ids == [1, 2, 3, 4]
    assert third.resume_from.resumptions == 1
    for again in (second, third):
        assert (again.image, again.task) == (first.image, first.task)
        assert again.options.request_id == "r-1", "the id that the stream has"


@pytest.mark.usefixtures("soon")
def test_events_wait_for_their_checkpoint(client, server):
    """Two events of one step are told together, once."""
    server.script["Generate"] += [
        [*stream(started(), text("a"), text("b", 1), text("c")), LOST],
        stream(started(), text("c"), text("d", 2), finished("abcd")),
    ]
    assert words(client.generate(IMAGE, QueryTask("?"))) == ["a", "b", "c", "d"]


@pytest.mark.usefixtures("soon")
def test_three_resumptions(client, server):
    """The fourth loss is raised."""
    server.script["Generate"] += [[*stream(started(), text("a", 1)), LOST]] * 4
    with pytest.raises(Unavailable):
        client.generate(IMAGE, QueryTask("?"))
    assert server.count("Generate") == 4


@pytest.mark.usefixtures("soon")
def test_a_connection_that_is_cut(client, server):
    """A transport says INTERNAL or UNKNOWN then, without the reason that a server gives."""
    cut = Failure(grpc.StatusCode.INTERNAL)
    server.script["Generate"] += [
        [*stream(started(), text("a", 1)), cut],
        [*stream(started(), text("b", 2)), Failure(grpc.StatusCode.UNKNOWN)],
        stream(started(), finished("ab")),
    ]
    assert words(client.generate(IMAGE, QueryTask("?"))) == ["a", "b"]
    bug = failure(grpc.StatusCode.INTERNAL, "INTERNAL")
    server.script["Generate"].append([*stream(started(), text("a", 1)), bug])
    with pytest.raises(InternalError):
        client.generate(IMAGE, QueryTask("?"))
    assert server.count("Generate") == 4


@pytest.mark.usefixtures("soon")
def test_a_stream_that_loses_its_end(client, server):
    """Also when `finished` came: its status tells whether it is the end."""
    server.script["Generate"] += [
        [*stream(started(), text("a", 1), finished("a")), LOST],
        stream(started(), finished("a")),
    ]
    events = client.generate(IMAGE, QueryTask("?"))
    assert words(events) == ["a"]
    assert sum(isinstance(event, Finished) for event in events) == 1


@pytest.mark.usefixtures("soon")
def test_a_busy_server_is_waited_for(client, server):
    """As long as it asks for, and it counts as a resumption."""
    full = failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_info(0.01))
    server.script["Generate"] += [
        [*stream(started(), text("a", 1)), LOST],
        full,
        stream(started(), finished("a")),
    ]
    assert words(client.generate(IMAGE, QueryTask("?"))) == ["a"]


@pytest.mark.usefixtures("soon")
def test_what_the_next_server_refuses_is_raised(client, server):
    """It may not hold the image."""
    server.script["Generate"] += [
        [*stream(started(), text("a", 1)), LOST],
        failure(grpc.StatusCode.NOT_FOUND, "IMAGE_NOT_FOUND"),
    ]
    with pytest.raises(NotFound):
        client.generate(IMAGE, QueryTask("?"))


@pytest.mark.usefixtures("soon")
def test_not_beyond_the_deadline(client, server, monkeypatch):
    """A resumption that would come too late is left out."""
    monkeypatch.setattr(transport, "_DELAYS", (100.0,) * 3)
    server.script["Generate"].append([*stream(started(), text("a", 1)), LOST])
    with pytest.raises(Unavailable):
        client.generate(IMAGE, QueryTask("?"), timeout=10)
    assert server.count("Generate") == 1
