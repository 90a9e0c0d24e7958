"""Streams that go on with another server: what is asked, and what the caller sees."""

import grpc
import pytest
from legato.v1 import inference_pb2, task_pb2
from legato_client import (
    Finished,
    InternalError,
    NotFound,
    Options,
    QueryTask,
    Started,
    TextDelta,
    Unavailable,
)
from legato_client._grpc import transport

from tests.clients.python.failures import Failure, failure, retry_info
from tests.clients.python.fake_server import INFO

IMAGE = b"\x89PNG\r\n\x1a\n" + bytes(16)
LOST = Failure(grpc.StatusCode.UNAVAILABLE)


@pytest.fixture(autouse=True)
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


def test_events_wait_for_their_checkpoint(client, server):
    """Two events of one step are told together, once."""
    server.script["Generate"] += [
        [*stream(started(), text("a"), text("b", 1), text("c")), LOST],
        stream(started(), text("c"), text("d", 2), finished("abcd")),
    ]
    assert words(client.generate(IMAGE, QueryTask("?"))) == ["a", "b", "c", "d"]


def test_three_resumptions(client, server):
    """The fourth loss is raised."""
    server.script["Generate"] += [[*stream(started(), text("a", 1)), LOST]] * 4
    with pytest.raises(Unavailable):
        client.generate(IMAGE, QueryTask("?"))
    assert server.count("Generate") == 4


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


def test_a_stream_that_loses_its_end(client, server):
    """Also when `finished` came: its status tells whether it is the end."""
    server.script["Generate"] += [
        [*stream(started(), text("a", 1), finished("a")), LOST],
        stream(started(), finished("a")),
    ]
    events = client.generate(IMAGE, QueryTask("?"))
    assert words(events) == ["a"]
    assert sum(isinstance(event, Finished) for event in events) == 1


def test_a_busy_server_is_waited_for(client, server):
    """As long as it asks for, and it counts as a resumption."""
    full = failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_info(0.01))
    server.script["Generate"] += [
        [*stream(started(), text("a", 1)), LOST],
        full,
        stream(started(), finished("a")),
    ]
    assert words(client.generate(IMAGE, QueryTask("?"))) == ["a"]


def test_what_the_next_server_refuses_is_raised(client, server):
    """It may not hold the image."""
    server.script["Generate"] += [
        [*stream(started(), text("a", 1)), LOST],
        failure(grpc.StatusCode.NOT_FOUND, "IMAGE_NOT_FOUND"),
    ]
    with pytest.raises(NotFound):
        client.generate(IMAGE, QueryTask("?"))


def test_not_beyond_the_deadline(client, server, monkeypatch):
    """A resumption that would come too late is left out."""
    monkeypatch.setattr(transport, "_DELAYS", (100.0,) * 3)
    server.script["Generate"].append([*stream(started(), text("a", 1)), LOST])
    with pytest.raises(Unavailable):
        client.generate(IMAGE, QueryTask("?"), timeout=10)
    assert server.count("Generate") == 1
