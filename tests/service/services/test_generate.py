"""Generate: the event grammar, heartbeats, checkpoints, and streams that continue from them."""

import asyncio
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf import duration_pb2
from legato.v1 import inference_pb2, media_pb2, task_pb2
from legato_engine.client.request_stream import RequestStream
from legato_engine.ipc.messages import OutputDelta, QueuePosition
from legato_engine.types import (
    CaptionSpec,
    QueryOutput,
    ReasoningEvent,
    Request,
    RequestKey,
    TextEvent,
    TokenInfo,
    TokensEvent,
)

from tests.grammar import Grammar, check, replay
from tests.service.fakes import FakeEngine, begin, delta, done, hold, solution, started, words
from tests.service.harness import image_message, refusal, running, until

TASKS = {
    "query": task_pb2.Task(query=task_pb2.QueryTask(question="How many?")),
    "reasoning": task_pb2.Task(query=task_pb2.QueryTask(question="2+2?", reasoning=True)),
    "caption": task_pb2.Task(caption=task_pb2.CaptionTask()),
    "detect": task_pb2.Task(detect=task_pb2.DetectTask(object="cup")),
    "point": task_pb2.Task(point=task_pb2.PointTask(object="cup")),
    "segment": task_pb2.Task(segment=task_pb2.SegmentTask(object="cup")),
}


def request(kind="query", **options):
    """Return a request of one task on an image."""
    return inference_pb2.GenerateRequest(
        image=image_message(),
        task=TASKS[kind],
        options=inference_pb2.RequestOptions(**options),
        stamp=media_pb2.FrameStamp(sequence=3),
    )


@pytest.mark.parametrize("kind", TASKS)
async def test_every_skill_keeps_the_grammar(kind):
    """A stream is started, deltas, finished, and finished repeats every delta."""
    async with running() as server:
        grammar = await replay(server.inference.Generate(request(kind)))
    finished = grammar.events[-1].finished
    assert finished.info.stamp.sequence == 3
    assert finished.info.usage.output_tokens == 9


async def test_the_task_id_comes_back():
    """The client's name of the task is in the result."""
    message = request()
    message.task.task_id = "count"
    async with running() as server:
        grammar = await replay(server.inference.Generate(message))
    assert grammar.events[-1].finished.result.task_id == "count"


async def test_a_waiting_request_is_queued_first():
    """Queued events precede started, with the position."""

    def wait_then_answer(engine, stream):
        engine_request = stream.request
        queued = [
            QueuePosition(request_id=engine_request.request_id, position=at, estimated_wait=at / 2)
            for at in (1, 0)
        ]
        _, result = solution(engine_request.task)
        engine.feed(
            stream,
            *queued,
            started(engine_request),
            delta(engine_request, *words("Three red cups.")),
        )
        engine.feed(stream, done(engine_request, result))

    async with running(FakeEngine(wait_then_answer)) as server:
        grammar = await replay(server.inference.Generate(request()))
    assert [event.queued.position for event in grammar.of("queued")] == [1, 0]
    assert grammar.of("queued")[0].queued.estimated_wait.ToMilliseconds() == 500


async def test_regions_are_messages_of_their_own():
    """Objects that complete in one step are sent one by one, whole."""

    def both_at_once(engine, stream):
        engine_request = stream.request
        events, result = solution(engine_request.task)
        engine.feed(
            stream,
            started(engine_request),
            delta(engine_request, *events),
            done(engine_request, result),
        )

    async with running(FakeEngine(both_at_once)) as server:
        grammar = await replay(server.inference.Generate(request("detect")))
    assert len(grammar.of("object")) == 2


async def test_waiting_text_is_one_message():
    """All text that waits is one event."""
    async with running() as server:
        grammar = await replay(server.inference.Generate(request()))
    assert [event.text.text for event in grammar.of("text")] == ["Three red cups."]


TOKENS = (
    TokenInfo(token_id=4),
    TokenInfo(token_id=5, text="Hi", logprob=-0.25, piece=b"Hi"),
    TokenInfo(token_id=6, logprob=0.0, coordinate=0.0),
    TokenInfo(token_id=7, size=(0.5, 0.25)),
)


def answer_with_tokens(engine, stream):
    """Respond with tokens of every kind, in every place."""
    engine_request = stream.request
    assert engine_request.return_tokens
    events = (
        ReasoningEvent(text="Hm", tokens=TOKENS[:1]),
        TextEvent(text="Hi", tokens=TOKENS[1:2]),
        TokensEvent(tokens=TOKENS[2:]),
    )
    result = QueryOutput(answer="Hi", reasoning="Hm")
    ended = msgspec.structs.replace(done(engine_request, result), tokens=TOKENS)
    engine.feed(stream, started(engine_request), delta(engine_request, *events), ended)


async def test_tokens_come_on_request():
    """`return_tokens` reaches the engine; every kind of token reaches the client, twice."""
    async with running(FakeEngine(answer_with_tokens)) as server:
        grammar = await replay(server.inference.Generate(request(return_tokens=True)))
        (engine_request,) = server.engine.requests
    assert not engine_request.logprobs
    start, text, place, size = grammar.tokens  # which `finished` repeats, by the grammar
    assert (start.token_id, start.text, start.HasField("logprob")) == (4, "", False)
    assert start.WhichOneof("value") is None
    assert (text.text, text.bytes, text.logprob) == ("Hi", b"Hi", -0.25)
    assert start.bytes == b""
    assert (place.WhichOneof("value"), place.coordinate, place.logprob) == ("coordinate", 0, 0)
    assert place.HasField("logprob")
    assert (size.size.width, size.size.height) == (0.5, 0.25)


async def test_logprobs_include_tokens():
    """A request for log-probabilities includes tokens, in a stream and in a unary call."""
    options = inference_pb2.RequestOptions(top_logprobs=0)
    message = inference_pb2.QueryRequest(question="?", options=options)
    async with running(FakeEngine(answer_with_tokens)) as server:
        await replay(server.inference.Generate(request(top_logprobs=0)))
        answered = await server.inference.Query(message)
        assert all(each.return_tokens and each.logprobs for each in server.engine.requests)
    assert [token.token_id for token in answered.info.tokens] == [4, 5, 6, 7]


async def test_silence_is_broken_by_heartbeats():
    """Heartbeats come after the requested silence, before and after started, and lose no output."""
    engine = FakeEngine(hold)
    interval = duration_pb2.Duration(nanos=1)  # raised to the least the contract allows
    async with running(engine) as server:
        call = server.inference.Generate(request(heartbeat_interval=interval))
        grammar = Grammar()
        grammar.feed(await call.read())
        assert grammar.events[-1].HasField("heartbeat")
        (stream,) = engine.streams.values()
        engine_request = stream.request
        engine.feed(stream, started(engine_request))
        while not (grammar.of("started") and grammar.events[-1].HasField("heartbeat")):
            grammar.feed(await call.read())
        _, result = solution(engine_request.task)
        engine.feed(
            stream, delta(engine_request, *words("Three red cups.")), done(engine_request, result)
        )
        async for event in _rest(call):
            grammar.feed(event)
    grammar.end(ok=True)


async def test_without_an_interval_there_are_no_heartbeats():
    """A stream without an interval has no heartbeats."""
    engine = FakeEngine(hold)
    async with running(engine) as server:
        call = server.inference.Generate(request())
        await until(lambda: bool(engine.streams))
        (stream,) = engine.streams.values()
        engine_request = stream.request
        engine.feed(stream, started(engine_request), done(engine_request, QueryOutput(answer="")))
        grammar = check([event async for event in _rest(call)], ok=True)
    assert not grammar.of("heartbeat")


async def _rest(call):
    while (event := await call.read()) is not grpc.aio.EOF:
        yield event


# ---------------------------------------------------------------- checkpoints
# Checkpoints of Generate, and streams that go on from them.

DETECT = task_pb2.Task(detect=task_pb2.DetectTask(object="cup"))


def resumable(*, checkpoints=True, resume_from=None, **options):
    return inference_pb2.GenerateRequest(
        image=image_message(),
        task=DETECT,
        options=inference_pb2.RequestOptions(**options),
        checkpoints=checkpoints,
        resume_from=resume_from,
    )


def checkpoint(**fields):
    """A valid one of two tokens, changed."""
    valid: dict[str, Any] = {"model": "fake-1", "seed": 5, "token_ids": [1, 2]}
    return inference_pb2.Checkpoint(**(valid | fields))


def in_two_deltas(engine, stream):
    """Two boxes of one delta."""
    asked = stream.request
    boxes, result = solution(asked.task)
    told = OutputDelta(
        request_id=asked.request_id,
        events=tuple(boxes),
        token_ids=(7, 8),
        payloads=((0.5, 0.0), (0.25, 0.125)),
        logprobs=(-0.5, -1.0),
    )
    engine.feed(stream, started(asked), told, done(asked, result))


async def test_checkpoints_add_up_to_what_the_engine_told():
    """`started` has model and seed, the last event of each delta its tokens, `finished` nothing."""
    async with running(FakeEngine(in_two_deltas)) as server:
        grammar = await replay(server.inference.Generate(resumable(request_id="robot-1")))
    events = grammar.events
    whole = inference_pb2.Checkpoint()
    for event in events:
        whole.MergeFrom(event.checkpoint)
    assert whole == inference_pb2.Checkpoint(
        model="fake-1",
        seed=RequestKey("robot-1").seed,
        token_ids=[7, 8],
        values=[0.5, 0, 0.25, 0.125],
        logprobs=[-0.5, -1],
    )
    kinds = [(event.WhichOneof("event"), event.HasField("checkpoint")) for event in events]
    assert kinds == [("started", True), ("object", False), ("object", True), ("finished", False)]


async def test_without_the_wish_there_are_none():
    """Streams of other clients are as they were."""
    async with running(FakeEngine(in_two_deltas)) as server:
        grammar = await replay(server.inference.Generate(resumable(checkpoints=False)))
    assert not any(event.HasField("checkpoint") for event in grammar.events)


async def test_a_stream_goes_on_where_its_checkpoint_says():
    """The engine gets the tokens and the seed, and no claim to a place in its queue."""
    given = checkpoint(values=[0.5, 0, 1, 0.25], logprobs=[-1, -2], resumptions=1)
    async with running() as server:
        stream = server.inference.Generate(resumable(resume_from=given, top_logprobs=0))
        grammar = await replay(stream)
        (received,) = server.engine.requests
    assert received.sampling.seed == 5
    resumed = received.resumed
    assert resumed is not None
    assert list(resumed.token_ids) == [1, 2]
    assert list(resumed.payloads) == [(0.5, 0), (1, 0.25)]
    assert list(resumed.logprobs) == [-1, -2]
    assert not resumed.admitted
    assert not received.was_admitted
    assert grammar.events[-1].finished.info.resumptions == 2
    (first,) = grammar.of("started")
    assert (first.checkpoint.resumptions, first.checkpoint.seed) == (2, 5)


async def test_an_engine_lost_later_is_told_the_checkpoint_too():
    """What a service process resumes begins with the client's tokens."""
    seen = []

    def lose(engine, stream):
        boxes, result = solution(stream.request.task)
        begin(engine, stream)
        engine.feed(
            stream,
            OutputDelta(request_id=stream.request_id, events=tuple(boxes), token_ids=(3,)),
        )
        seen.append(stream.resumed(()).resumed)
        engine.feed(stream, done(stream.request, result))

    async with running(FakeEngine(lose)) as server:
        await replay(server.inference.Generate(resumable(resume_from=checkpoint())))
    assert seen[0].token_ids == (1, 2, 3)
    assert seen[0].admitted


WRONG = {
    "model": checkpoint(model="another"),
    "model, absent": checkpoint(model=""),
    "seed": inference_pb2.Checkpoint(model="fake-1"),
    "token_ids": checkpoint(token_ids=range(513)),
    "values": checkpoint(values=[0.5]),
    "values[1]": checkpoint(values=[0.5, float("nan"), 0, 0]),
    "values[3]": checkpoint(values=[0, 0, 0, 1.5]),
    "logprobs": checkpoint(logprobs=[-1, -1]),
    "resumptions": checkpoint(resumptions=1001),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_cannot_be_a_checkpoint_is_named(name):
    """INVALID_FIELD with the path of the part; the engine sees nothing of it."""
    async with running() as server:
        refused = await refusal(
            replay(server.inference.Generate(resumable(resume_from=WRONG[name])))
        )
        assert server.engine.requests == []
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.details["ErrorInfo"].metadata["field"] == f"resume_from.{name.split(',')[0]}"


async def test_log_probabilities_that_are_wanted_must_be_given():
    """And they are finite."""
    async with running() as server:
        for logprobs in ([], [-1], [-1, float("inf")]):
            given = checkpoint(logprobs=logprobs)
            stream = server.inference.Generate(resumable(resume_from=given, top_logprobs=0))
            refused = await refusal(replay(stream))
            assert refused.details["ErrorInfo"].metadata["field"].startswith("resume_from.logprobs")


async def test_a_seed_of_its_own_must_be_the_checkpoints():
    """Else other tokens would follow."""
    message = resumable(resume_from=checkpoint())
    message.task.sampling.seed = 6
    async with running() as server:
        refused = await refusal(replay(server.inference.Generate(message)))
    assert refused.details["ErrorInfo"].metadata["field"] == "resume_from.seed"


async def test_a_resumed_stream_takes_its_id_over():
    """The stream that its client gave up ends with its work; one that ended is forgotten."""
    async with running(FakeEngine(hold)) as server:
        lost = server.inference.Generate(resumable(request_id="robot-1"))
        reading = asyncio.create_task(refusal(replay(lost)))
        await until(lambda: len(server.engine.requests) == 1)
        server.engine.script = in_two_deltas
        message = resumable(request_id="robot-1", resume_from=checkpoint())
        await replay(server.inference.Generate(message))
        assert (await reading).reason == "DUPLICATE_REQUEST"
        assert len(server.engine.aborted) == 1
        await replay(server.inference.Generate(message))
        other = await refusal(replay(server.inference.Generate(resumable(request_id="robot-1"))))
        assert other.reason == "DUPLICATE_REQUEST", "a new stream needs another id"


def without_an_image(request_id):
    """Resumes with bytes that are no image."""
    message = resumable(request_id=request_id, resume_from=checkpoint())
    message.image.encoded.data = b"no image"
    return message


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (resumable(request_id="robot-1", resume_from=WRONG["values[1]"]), "INVALID_FIELD"),
        (resumable(request_id="robot-1", resume_from=WRONG["model"]), "INVALID_FIELD"),
        (resumable(request_id="robot-1", resume_from=checkpoint(), model="x"), "MODEL_NOT_FOUND"),
        (without_an_image("robot-1"), "IMAGE_UNDECODABLE"),
    ],
    ids=["values", "origin", "model", "image"],
)
async def test_what_cannot_be_resumed_ends_no_stream(message, reason):
    """The stream of this id runs on to its own end."""
    async with running(FakeEngine(hold)) as server:
        reading = asyncio.create_task(
            replay(server.inference.Generate(resumable(request_id="robot-1")))
        )
        await until(lambda: len(server.engine.requests) == 1)
        assert (await refusal(replay(server.inference.Generate(message)))).reason == reason
        assert server.engine.aborted == []
        (stream,) = server.engine.streams.values()
        in_two_deltas(server.engine, stream)
        assert (await reading).events[-1].HasField("finished")


async def test_a_resumption_that_is_not_admitted_ends_no_stream():
    """The estimated wait is longer than its deadline."""
    async with running(FakeEngine(hold)) as server:
        reading = asyncio.create_task(
            replay(server.inference.Generate(resumable(request_id="robot-1")))
        )
        await until(lambda: len(server.engine.requests) == 1)
        message = resumable(request_id="robot-1", resume_from=checkpoint())
        server.engine.estimated_wait = 1000.0
        late = server.inference.Generate(message, timeout=100.0)
        assert (await refusal(replay(late))).reason == "DEADLINE_UNREACHABLE"
        assert server.engine.aborted == []
        (stream,) = server.engine.streams.values()
        in_two_deltas(server.engine, stream)
        assert (await reading).events[-1].HasField("finished")


async def test_a_unary_call_keeps_its_id():
    """Only a stream can be resumed."""
    async with running() as server:
        options = inference_pb2.RequestOptions(request_id="robot-1")
        await server.inference.Query(
            inference_pb2.QueryRequest(question="How many?", options=options)
        )
        message = resumable(request_id="robot-1", resume_from=checkpoint())
        refused = await refusal(replay(server.inference.Generate(message)))
    assert refused.reason == "DUPLICATE_REQUEST"


async def test_deltas_that_were_not_read_in_time_keep_their_tokens():
    """A client that reads slowly gets merged events, and every token once."""
    asked = Request(request_id=RequestKey("r"), task=CaptionSpec())
    stream = RequestStream(asked, lambda _: None, lambda _: None)
    one = OutputDelta(request_id=asked.request_id, events=words("a"), payloads=((0.0, 1.0),))
    for index in range(200):
        stream.feed(msgspec.structs.replace(one, token_ids=(index,), logprobs=(-float(index),)))
    merged = await anext(stream)
    assert isinstance(merged, OutputDelta)
    assert merged.token_ids == tuple(range(200))
    assert merged.logprobs == tuple(-float(index) for index in range(200))
    assert len(merged.payloads) == 200
