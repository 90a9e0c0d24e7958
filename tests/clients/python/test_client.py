"""Both faces of the client against a scripted server."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import grpc
import pytest
from legato_client import (
    AsyncClient,
    Box,
    Busy,
    CachedImage,
    CaptionTask,
    Client,
    DetectTask,
    FailedPrecondition,
    Finished,
    FrameStamp,
    IncompleteStream,
    InvalidArgument,
    Options,
    Point,
    PointTask,
    QueryResult,
    QueryTask,
    Queued,
    Sampling,
    SegmentTask,
    Started,
    TextDelta,
    Unavailable,
)
from legato_client._version import CONTRACT_REVISION

from tests.clients.python.failures import Failure, failure, retry_info
from tests.clients.python.fake_server import STREAMS

IMAGE = b"picture"


def test_spatial_answers(client, server):
    """Detect, Point and Segment give typed places in fractions of the image."""
    assert client.detect(IMAGE, "cat").objects[0].box == Box(0.25, 0.5, 0.75, 1.0)
    assert client.point(IMAGE, "nose").points[0].point == Point(0.5, 0.25)
    outline = client.segment(IMAGE, "cat").segments[0]
    assert outline.polygons() == ((Point(0.25, 0.5), Point(0.75, 0.5), Point(0.75, 1.0)),)
    assert server.last("Detect").object == "cat"


def test_text_answers(client, server):
    """Query and Caption give text, and their parameters reach the server."""
    assert client.query(None, "how many?", reasoning=True).answer == "two cats"
    assert client.caption(IMAGE, "short").caption == "a cat"
    assert server.last("Query").reasoning
    assert not server.last("Query").HasField("image")
    assert server.last("Caption").length == 1


def test_response_info(client):
    """An answer says how it came about; what the server left out is None."""
    info = client.detect(IMAGE, "cat").info
    assert (info.request_id, info.model, info.finish_reason) == ("r-1", "fake", "stop")
    assert info.usage.cached_tokens == 0
    assert info.usage.image_tokens is None
    assert info.timings.total == pytest.approx(0.012)
    assert info.image.width == 200
    assert info.stamp is None


def test_options_reach_the_server(client, server):
    """Sampling, options, stamp and spatial references are sent; absent scalars stay absent."""
    stamp = FrameStamp("camera", 1_500_000_000, 7)
    client.point(
        CachedImage("i-1"),
        "nose",
        spatial_refs=[Point(0.5, 0.5), Box(0, 0, 1, 1)],
        sampling=Sampling(temperature=0.0, stop=("x",)),
        options=Options(request_id="mine", model="m", cache_image=False, stamp=stamp),
    )
    request = server.last("Point")
    assert request.image.image_id == "i-1"
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")
    assert [ref.WhichOneof("ref") for ref in request.spatial_refs] == ["point", "box"]
    assert (request.options.request_id, request.options.model) == ("mine", "m")
    assert request.options.HasField("cache_image")
    assert not request.options.cache_image
    assert (request.stamp.frame_id, request.stamp.capture_time.seconds) == ("camera", 1)


def test_metadata(server):
    """Every call names its client, and brings token, priority, tenant and the caller's own."""
    with Client(
        server.target, token="secret", priority=-3, tenant="lab", metadata=(("x-robot", "7"),)
    ) as client:
        client.detect(IMAGE, "cat")
        client.put_image(IMAGE)
    for headers in (server.requests[0][2], server.images.metadata[0]):
        assert headers["authorization"] == "Bearer secret"
        assert (headers["legato-priority"], headers["legato-tenant"]) == ("-3", "lab")
        assert headers["x-robot"] == "7"
        sdk, _, revision = headers["legato-client"].split("/")
        assert (sdk, revision) == ("python", str(CONTRACT_REVISION))


def test_plain_metadata(server):
    """Without a priority and a tenant none is sent."""
    with Client(server.target) as client:
        client.detect(IMAGE, "cat")
    assert not {"legato-priority", "legato-tenant", "authorization"} & set(server.requests[0][2])


def test_generate(client):
    """A stream yields its events in order, without heartbeats, `Finished` last."""
    events = client.generate(IMAGE, QueryTask("how many?"))
    assert isinstance(events[0], Queued)
    assert isinstance(events[1], Started)
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert isinstance(events[-1], Finished)
    result = events[-1].result
    assert isinstance(result, QueryResult)
    assert text == result.answer == "two cats"
    assert result.info.finish_reason == "length"
    assert len(events) == len(STREAMS["query"]) - 1


@pytest.mark.parametrize(
    "task", [CaptionTask("long"), DetectTask("cat", 4), PointTask("nose"), SegmentTask("cat")]
)
def test_generate_any_task(client, server, task):
    """Any task can be streamed; the last delta and the result agree."""
    events = client.generate(IMAGE, task)
    kind = server.last("Generate").task.WhichOneof("kind")
    assert type(task).__name__.lower() == kind + "task"
    result = events[-1].result
    if kind == "detect":
        assert result.objects == (events[-2],)
        assert server.last("Generate").task.detect.max_objects == 4


def test_incomplete_stream(client, server):
    """A stream that ends with OK but without `Finished`, or skips an event, is an error."""
    server.script["Generate"] += [STREAMS["detect"][:-1], STREAMS["detect"][1:]]
    for _ in range(2):
        with pytest.raises(IncompleteStream):
            client.generate(IMAGE, DetectTask("cat"))


def test_stream_failure(client, server):
    """A stream that breaks raises the typed error after the events that came."""
    lost = failure(grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST")
    server.script["Generate"].append([*STREAMS["query"][:3], lost])
    with pytest.raises(Unavailable) as caught:
        client.generate(IMAGE, QueryTask("?"))
    assert caught.value.reason == "ENGINE_LOST"
    assert server.count("Generate") == 1


def test_unknown_event_is_skipped(client, server):
    """An event of a newer contract is passed over."""
    rows = [type(row)(index=number) for number, row in enumerate(STREAMS["detect"][:1])]
    server.script["Generate"].append([*rows, *STREAMS["detect"][1:]])
    events = client.generate(IMAGE, DetectTask("cat"))
    assert isinstance(events[0], Started)


def test_run_tasks(client):
    """One outcome per task in order; a task that failed alone is its error."""
    tasks = [CaptionTask(), SegmentTask("cat", task_id="broken"), DetectTask("cat", task_id="b")]
    caption, broken, found = client.run_tasks(IMAGE, tasks)
    assert caption.caption == "a cat"
    assert isinstance(broken, FailedPrecondition)
    assert broken.reason == "TASK_UNSUPPORTED"
    assert found.task_id == "b"


def test_unavailable_is_retried(client, server):
    """A call that meets UNAVAILABLE twice succeeds at the third attempt."""
    server.script["Detect"] += [Failure(grpc.StatusCode.UNAVAILABLE)] * 2
    assert client.detect(IMAGE, "cat").objects
    assert server.count("Detect") == 3


def test_stream_start_is_retried(client, server):
    """A stream that fails before its first event is started again."""
    server.script["Generate"] += [Failure(grpc.StatusCode.UNAVAILABLE)] * 2
    assert isinstance(client.generate(IMAGE, DetectTask("cat"))[-1], Finished)
    assert server.count("Generate") == 3


def test_other_failures_are_not_retried(client, server):
    """INTERNAL is raised at once."""
    server.script["Detect"] += [Failure(grpc.StatusCode.INTERNAL)] * 2
    with pytest.raises(Exception, match="INTERNAL"):
        client.detect(IMAGE, "cat")
    assert server.count("Detect") == 1


def test_busy_is_retried_when_told_when(client, server):
    """A full queue is asked again after the delay it names, and not without one."""
    full = grpc.StatusCode.RESOURCE_EXHAUSTED
    server.script["Detect"].append(failure(full, "QUEUE_FULL", retry_info(0.01)))
    assert client.detect(IMAGE, "cat").objects
    server.script["Detect"].append(failure(full, "QUEUE_FULL"))
    with pytest.raises(Busy):
        client.detect(IMAGE, "cat")
    assert server.count("Detect") == 3


def test_oversize_request(server):
    """A request above the size limit is refused before it is sent, as what it is."""
    client = Client(server.target, max_message_bytes=1000)
    with client, pytest.raises(InvalidArgument) as caught:
        client.detect(bytes(2000), "cat")
    assert caught.value.reason == "IMAGE_TOO_LARGE"
    assert caught.value.metadata["limit"] == "1000"
    assert not server.requests


def test_deadline_is_sent(server):
    """The caller's timeout ends a call that hangs, as DeadlineExceeded."""
    hang = threading.Event()
    server.script["Generate"].append([hang])
    with Client(server.target) as client, pytest.raises(Exception, match="DEADLINE_EXCEEDED"):
        list(client.generate(IMAGE, DetectTask("cat"), timeout=0.2))
    hang.set()


def test_leaving_a_stream_cancels_it(server):
    """Closing the iterator early cancels the work on the server."""
    rest = threading.Event()
    server.script["Generate"].append([*STREAMS["query"][:3], rest, *STREAMS["query"][3:]])
    with Client(server.target) as client:
        with contextlib.closing(client.generate(IMAGE, QueryTask("?"))) as events:
            next(events)
        assert server.stream_ended.wait(30)
    rest.set()


def test_stopping_at_the_end_cancels_nothing(server):
    """`Finished` comes when the call has ended: a caller that stops there interrupts no one."""
    with Client(server.target) as client:
        next(e for e in client.generate(IMAGE, QueryTask("?")) if isinstance(e, Finished))
        assert server.num_completed == 1


async def test_leaving_an_async_stream_cancels_it(server):
    """Closing the asyncio iterator early cancels the work on the server."""
    rest = threading.Event()
    server.script["Generate"].append([*STREAMS["query"][:3], rest, *STREAMS["query"][3:]])
    async with AsyncClient(server.target) as client:
        async with contextlib.aclosing(client.generate(IMAGE, QueryTask("?"))) as events:
            await anext(events)
        assert await asyncio.to_thread(server.stream_ended.wait, 30)
    rest.set()


def test_server_info_and_models(client):
    """The server's own account is typed, and all pages of models are read."""
    assert client.server_info().version == "1.2.3"
    assert [model.name for model in client.models()] == ["first", "second"]


def test_default_target(server, monkeypatch):
    """Without a target the client asks the server that LEGATO_SERVER names."""
    monkeypatch.setenv("LEGATO_SERVER", server.target)
    with Client() as client:
        assert client.detect(IMAGE, "cat").objects
