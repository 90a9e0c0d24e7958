"""Generate: the event grammar, coalescing and heartbeats."""

import grpc
import msgspec
import pytest
from google.protobuf import duration_pb2
from legato.v1 import inference_pb2, media_pb2, task_pb2
from legato_engine.ipc.messages import Queued
from legato_engine.types import QueryResult, ReasoningDelta, TextDelta, TokenInfo, TokensDelta

from tests.grammar import Grammar, check, replay
from tests.service.fakes import FakeEngine, delta, done, hold, solution, started, words
from tests.service.harness import image_message, running, until

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
            Queued(request_id=engine_request.request_id, position=at, estimated_wait=at / 2)
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
        ReasoningDelta(text="Hm", tokens=TOKENS[:1]),
        TextDelta(text="Hi", tokens=TOKENS[1:2]),
        TokensDelta(tokens=TOKENS[2:]),
    )
    result = QueryResult(answer="Hi", reasoning="Hm")
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
        engine.feed(stream, started(engine_request), done(engine_request, QueryResult(answer="")))
        grammar = check([event async for event in _rest(call)], ok=True)
    assert not grammar.of("heartbeat")


async def _rest(call):
    while (event := await call.read()) is not grpc.aio.EOF:
        yield event
