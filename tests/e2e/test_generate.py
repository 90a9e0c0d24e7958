"""Generate: every skill's events, in the order of the contract, while they are made."""

import asyncio
from contextlib import suppress

import grpc
import pytest
from legato.v1 import inference_pb2, inference_pb2_grpc, task_pb2

from tests.e2e.scenes import long_stream, many_circles, two_shapes
from tests.grammar import check, replay

SCENE = two_shapes()
TASKS = {
    "query": task_pb2.Task(query=task_pb2.QueryTask(question="How many circles are there?")),
    "caption": task_pb2.Task(caption=task_pb2.CaptionTask(length=task_pb2.CAPTION_LENGTH_LONG)),
    "detect": task_pb2.Task(detect=task_pb2.DetectTask(object="red circle")),
    "point": task_pb2.Task(point=task_pb2.PointTask(object="red circle")),
    "segment": task_pb2.Task(segment=task_pb2.SegmentTask(object="red circle")),
}
DELTAS = {
    "query": "text",
    "caption": "text",
    "detect": "object",
    "point": "point",
    "segment": "outline",
}


def request(task, scene=SCENE):
    """A stream of that task."""
    return inference_pb2.GenerateRequest(image=scene.message(), task=task)


@pytest.mark.parametrize("skill", TASKS)
def test_every_skill_keeps_to_the_grammar(server, skill):
    """Started, deltas of the skill's own kind, finished; the deltas add up to the result."""
    grammar = check(server.inference.Generate(request(TASKS[skill])), ok=True)
    kinds = {event.WhichOneof("event") for event in grammar.events}
    assert kinds == {"started", "finished", DELTAS[skill]}


@pytest.mark.parametrize("skill", TASKS)
def test_a_stream_says_what_a_call_says(server, skill):
    """Generate ends with the result of the unary call."""
    (finished,) = check(server.inference.Generate(request(TASKS[skill])), ok=True).of("finished")
    tasks = inference_pb2.RunTasksRequest(image=SCENE.message(), tasks=[TASKS[skill]])
    (alone,) = server.inference.RunTasks(tasks).results
    streamed = finished.finished.result
    assert getattr(streamed, skill) == getattr(alone, skill)
    assert streamed.finish_reason == alone.finish_reason


@pytest.mark.parametrize("skill", ["detect", "point", "segment"])
async def test_places_are_sent_the_step_they_are_complete(server, skill):
    """Boxes, points and pieces of an outline are not kept back until the end.

    A question decodes in the same steps, so its words mark the steps that lie between the places.
    """
    words = []
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        marker = stub.Generate(long_stream())
        runs = asyncio.Event()

        async def mark():
            with suppress(asyncio.CancelledError):  # of the call, when the places are all there
                async for event in marker:
                    runs.set()
                    words.append(event.index)

        marking = asyncio.create_task(mark())
        await runs.wait()
        places = stub.Generate(request(TASKS[skill], many_circles()))
        seen = [(event, len(words)) async for event in places]
        marker.cancel()
        await marking
    check([event for event, _ in seen], ok=True)
    moments = [moment for event, moment in seen if event.WhichOneof("event") == DELTAS[skill]]
    assert len(moments) >= 8
    assert len(set(moments)) >= 4, "the places came together"


async def test_text_is_sent_word_by_word(server):
    """A caption comes in more than a few pieces."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        grammar = await replay(stub.Generate(request(TASKS["caption"])))
    assert len(grammar.of("text")) > 5


def test_tokens_come_with_their_text(server):
    """With `return_tokens` every word names its tokens, and the end as many as were counted."""
    asked = request(TASKS["caption"])
    asked.options.return_tokens = True
    grammar = check(server.inference.Generate(asked), ok=True)
    finished = grammar.of("finished")[0].finished
    assert len(finished.info.tokens) == finished.info.usage.output_tokens
    tokens = [token for event in grammar.of("text") for token in event.text.tokens]
    caption = grammar.of("finished")[0].finished.result.caption.caption
    assert "".join(token.text for token in tokens).strip() == caption.strip()
