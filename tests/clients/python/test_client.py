"""Both faces of the client against a scripted server."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from legato.v1 import geometry_pb2, inference_pb2, task_pb2
from legato_client import (
    AsyncClient,
    Box,
    Busy,
    CachedImage,
    CaptionTask,
    Client,
    ClipFrame,
    DetectTask,
    FailedPrecondition,
    Finished,
    FrameStamp,
    IncompleteStream,
    InvalidArgument,
    Message,
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
    Token,
    TokenAlternative,
    TokensDelta,
    Unavailable,
)
from legato_client._client_methods import ClientMethods
from legato_client._version import CONTRACT_REVISION
from PIL import Image

from tests.clients.python.fake_server import STREAMS, Failure, events, failure, retry_info

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


# ---------------------------------------------------------------- both faces

CALLS = [name for name in vars(ClientMethods) if not name.startswith("_")]


@pytest.mark.parametrize("name", [*CALLS, "session", "encode_image", "lift"])
@pytest.mark.parametrize("face", [Client, AsyncClient])
def test_every_call_has_its_face(face, name):
    """Whatever can be called is a method of both faces, with its parameters and a sentence."""
    method = getattr(face, name)
    assert inspect.getdoc(method)
    shown = list(inspect.signature(method).parameters)
    assert shown[0] == "self"
    assert shown[1:] == list(inspect.signature(getattr(Client, name)).parameters)[1:]
    assert "args" not in shown


def test_there_are_calls():
    """The list above is not empty by mistake."""
    assert {"detect", "generate", "put_image", "server_info", "abort"} <= set(CALLS)


# ---------------------------------------------------------------- tokens
# Sampled tokens, as both faces of the client give them.

TOKENS = (
    inference_pb2.Token(
        token_id=9,
        text="hi",
        bytes=b"hi",
        logprob=-0.5,
        alternatives=[inference_pb2.TokenAlternative(token_id=8, bytes=b"\xf0", logprob=-1.0)],
    ),
    inference_pb2.Token(token_id=5, coordinate=0.0),
    inference_pb2.Token(token_id=6, size=geometry_pb2.Size(width=0.5, height=0.25)),
)
SAME_TOKENS = (
    Token(
        9,
        "hi",
        logprob=-0.5,
        alternatives=(TokenAlternative(8, "", -1.0, b"\xf0"),),
        bytes=b"hi",
    ),
    Token(5, "", coordinate=0.0),
    Token(6, "", size=(0.5, 0.25)),
)


def test_tokens_of_an_answer(client, server):
    """Tokens come typed, and an absent value or probability is None, not 0."""
    info = inference_pb2.ResponseInfo(tokens=TOKENS)
    reply = inference_pb2.CaptionResponse(caption="hi", info=info)
    server.script["Caption"].append(reply)
    options = Options(return_tokens=True, top_logprobs=0)
    assert client.caption(IMAGE, options=options).info.tokens == SAME_TOKENS
    asked = server.last("Caption").options
    assert asked.return_tokens
    assert asked.HasField("top_logprobs")
    assert client.caption(IMAGE).info.tokens == ()


def test_tokens_of_a_stream(client, server):
    """Tokens come beside text and thoughts, or in events of their own; the end has all of them."""
    text, *others = TOKENS
    finished = task_pb2.TaskResult(query=task_pb2.QueryResult(answer="hi"))
    rows = events(
        ("reasoning", inference_pb2.ReasoningDelta(text="hi", tokens=[text])),
        ("text", inference_pb2.TextDelta(text="hi", tokens=[text])),
        ("tokens", inference_pb2.TokensDelta(tokens=others)),
        finished=finished,
    )
    rows[-1].finished.info.tokens.extend(TOKENS)
    server.script["Generate"].append(rows)
    *_, thought, words, rest, last = client.generate(IMAGE, QueryTask("?"))
    assert (thought.tokens, words.tokens) == (SAME_TOKENS[:1], SAME_TOKENS[:1])
    assert rest == TokensDelta(SAME_TOKENS[1:])
    assert last.result.info.tokens == SAME_TOKENS


def test_tokens_of_tasks(client, server):
    """Each of several tasks has its own tokens."""
    results = [
        task_pb2.TaskResult(caption=task_pb2.CaptionResult(caption=caption)) for caption in "ab"
    ]
    tokens = [inference_pb2.TaskTokens(tokens=TOKENS), inference_pb2.TaskTokens(tokens=TOKENS[:1])]
    reply = inference_pb2.RunTasksResponse(results=results, tokens=tokens)
    server.script["RunTasks"].append(reply)
    first, second = client.run_tasks(IMAGE, [CaptionTask(), CaptionTask()])
    assert (first.info.tokens, second.info.tokens) == (SAME_TOKENS, SAME_TOKENS[:1])


# ---------------------------------------------------------------- chat
# Conversations, as both faces of the client send them.

HELD_IMAGE = CachedImage("i-7")
TALK = (
    Message("system", "Be short."),
    Message("user", (HELD_IMAGE, "What ", "is it?")),
    Message("assistant", "A cup."),
    Message("user", "Of what colour?"),
)


def told(messages):
    """What a server reads of them: roles, and texts with an image as None."""
    return [
        (message.role, [part.text if part.HasField("text") else None for part in message.parts])
        for message in messages
    ]


SAME = [
    (task_pb2.CHAT_ROLE_SYSTEM, ["Be short."]),
    (task_pb2.CHAT_ROLE_USER, [None, "What ", "is it?"]),
    (task_pb2.CHAT_ROLE_ASSISTANT, ["A cup."]),
    (task_pb2.CHAT_ROLE_USER, ["Of what colour?"]),
]


def test_chat(client, server):
    """Messages go in order, and the image that one of them shows is the request's."""
    answer = client.chat(TALK, reasoning=True, sampling=Sampling(max_tokens=5))
    assert answer.answer == "two cats"
    asked = server.last("Query")
    assert told(asked.messages) == SAME
    assert asked.image.image_id == "i-7"
    assert (asked.question, asked.reasoning, asked.sampling.max_tokens) == ("", True, 5)


def test_chat_without_a_image(client, server):
    """A conversation of words alone has no image."""
    client.chat([Message("user", "Hi")])
    assert not server.last("Query").HasField("image")


def test_chat_streams(client, server):
    """A conversation is a task of `generate`, with its image inside or beside it."""
    task = QueryTask(messages=TALK)
    assert isinstance(client.generate(None, task)[-1], Finished)
    asked = server.last("Generate")
    assert told(asked.task.query.messages) == SAME
    assert asked.image.image_id == "i-7"
    client.generate(HELD_IMAGE, QueryTask(messages=(Message("user", "Hi"),)))
    assert server.last("Generate").image.image_id == "i-7"


def test_chat_reads_a_file(client, server, tmp_path):
    """A path is an image; a string is text even if a file is called so."""
    path = tmp_path / "picture"
    path.write_bytes(b"bytes")
    client.chat([Message("user", [Path(path), str(path)])])
    asked = server.last("Query")
    assert asked.image.encoded.data == b"bytes"
    assert told(asked.messages) == [(task_pb2.CHAT_ROLE_USER, [None, str(path)])]


def test_several_images(client, server, tmp_path):
    """In a list, in messages, or as frames of a clip, each of any type, in order."""
    path = tmp_path / "image.png"
    path.write_bytes(b"file")
    told_apart = [HELD_IMAGE, b"bytes", ClipFrame(path, 0.5), ClipFrame(b"later", 1.25)]
    expected = [("i-7", b"", 0.0), ("", b"bytes", 0.0), ("", b"file", 0.5), ("", b"later", 1.25)]

    def read(message):
        return [
            (each.image.image_id, each.image.encoded.data, each.time.ToNanoseconds() / 1e9)
            for each in message.images
        ]

    client.query(told_apart, "Which is larger?")
    asked = server.last("Query")
    assert (read(asked), asked.HasField("image")) == (expected, False)
    client.query([b"alone"], "What?")
    assert server.last("Query").image.encoded.data == b"alone"
    client.generate(told_apart, QueryTask("Which?"))
    assert read(server.last("Generate").task.query) == expected
    client.chat([Message("user", ["One:", HELD_IMAGE, "two:", b"bytes"])])
    asked = server.last("Query")
    assert read(asked) == expected[:2]
    assert told(asked.messages) == [(task_pb2.CHAT_ROLE_USER, ["One:", None, "two:", None])]


def test_images_that_no_call_takes(client, server):
    """Images given twice, or several for a spatial task, are refused before anything is sent."""
    with pytest.raises(ValueError, match="not both"):
        client.generate(HELD_IMAGE, QueryTask(messages=TALK))
    with pytest.raises(ValueError, match="detect takes one image, got 2"):
        client.generate([HELD_IMAGE, b"bytes"], DetectTask("cup"))
    nobody: Any = "judge"
    with pytest.raises(ValueError, match="role"):
        client.chat([Message(nobody, "Hi")])
    assert not server.requests


def test_a_shared_image_is_not_inside_a_message(client, server):
    """Where several tasks share an image, one inside a message is refused, not lost."""
    with pytest.raises(ValueError, match="beside the tasks"):
        client.run_tasks(None, [QueryTask(messages=TALK)])
    with (
        Client(server.target) as blocking,
        pytest.raises(ValueError, match="beside the tasks"),
    ):
        blocking.session([QueryTask(messages=TALK)]).__enter__()
    client.run_tasks(HELD_IMAGE, [QueryTask(messages=TALK[2:])])
    assert len(server.last("RunTasks").tasks[0].query.messages) == 2


def test_a_string_is_a_conversation(client, server):
    """`chat("Hi")` asks that one question."""
    assert client.chat("Hi").answer
    assert told(server.last("Query").messages) == [(task_pb2.CHAT_ROLE_USER, ["Hi"])]


TABLE = Path(__file__).parents[3] / "docs" / "migration-from-moondream.md"
ROWS = re.findall(r"^\| `(.+)` \| `(.+)` \|$", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
SKILLS = ("caption", "query", "chat", "detect", "point", "segment", "encode_image")


def test_every_line_works(server):
    """Each line on the right runs, after those above it, against a server."""
    names: dict[str, Any] = {"image": Image.new("RGB", (200, 100))}
    for _, line in ROWS:
        exec(line.replace("127.0.0.1:50051", server.target), names)
    assert names["text"] == ["a cat"]
    assert isinstance(names["last"], names["Finished"])
    assert names["encoded"].image_id in server.images.held
    assert server.last("Query").image.image_id == names["encoded"].image_id
    assert server.last("Caption").sampling.max_tokens == 64


@pytest.mark.parametrize("skill", SKILLS)
def test_every_skill_is_there(skill):
    """The table speaks of each call of that package, under the same name on both sides."""
    rows = [row for row in ROWS if f"model.{skill}(" in row[0]]
    assert rows
    for theirs, ours in rows:
        assert f"client.{skill}(" in ours or "stream=True" in theirs
