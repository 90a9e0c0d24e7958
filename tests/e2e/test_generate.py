"""Generate: every skill's events, in the order of the contract, while they are made."""

import asyncio
import re
from contextlib import suppress

import grpc
import pytest
from legato.v1 import inference_pb2, inference_pb2_grpc, task_pb2

from tests.e2e.scenes import long_stream, many_circles, two_shapes
from tests.grammar import check

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

    Readers that wait for a processor see several steps at once, so one run of some must show it.
    """
    for _ in range(5):
        moments = await moments_of_places(server, skill)
        if len(moments) >= 8 and len(set(moments)) >= 4:
            return
    raise AssertionError(f"the places came together: {moments}")


async def moments_of_places(server, skill):
    """The number of words that each event with places followed.

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
    return [moment for event, moment in seen if event.WhichOneof("event") == DELTAS[skill]]


# ---------------------------------------------------------------- response formats

SCHEMA = """{"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9},
"colour": {"enum": ["red", "green"]}}, "required": ["n", "colour"],
"additionalProperties": false}"""
FORMATS = {
    "json_schema": (
        task_pb2.ResponseFormat(json_schema=SCHEMA),
        r'\{"n":[0-9],"colour":"(red|green)"\}',
    ),
    "regex": (task_pb2.ResponseFormat(regex="[A-D][0-9]{2}"), "[A-D][0-9]{2}"),
    "choices": (
        task_pb2.ResponseFormat(choices=task_pb2.Choices(texts=["circle", "square"])),
        "circle|square",
    ),
    "grammar": (
        task_pb2.ResponseFormat(grammar='root ::= ("a" | "b")+ "."\n'),
        r"[ab]+\.",
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_matches_its_format(server, name):
    """Query and Generate give the same answer, which matches and ends by itself."""
    wanted, pattern = FORMATS[name]
    question = "Which shape is there?"
    sampling = task_pb2.Sampling(temperature=1.0, seed=3, max_tokens=200)
    answer = server.inference.Query(
        inference_pb2.QueryRequest(
            image=SCENE.message(), question=question, sampling=sampling, response_format=wanted
        )
    )
    query = task_pb2.QueryTask(question=question, response_format=wanted)
    task = task_pb2.Task(query=query, sampling=sampling)
    (finished,) = check(server.inference.Generate(request(task)), ok=True).of("finished")
    assert re.fullmatch(pattern, answer.answer)
    assert finished.finished.result.query.answer == answer.answer
    assert answer.info.finish_reason == task_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        (task_pb2.ResponseFormat(), "response_format"),
        (task_pb2.ResponseFormat(json_schema='{"type":"colour"}'), "response_format.json_schema"),
        (task_pb2.ResponseFormat(regex="("), "response_format.regex"),
        (task_pb2.ResponseFormat(regex="a" * 70_000), "response_format.regex"),
        (task_pb2.ResponseFormat(choices=task_pb2.Choices()), "response_format"),
        (task_pb2.ResponseFormat(grammar="start: missing"), "response_format.grammar"),
    ],
)
def test_a_bad_format_is_refused(server, wanted, field):
    """INVALID_ARGUMENT names the field, and a stream that runs meanwhile is not disturbed."""
    running = server.inference.Generate(request(TASKS["caption"]))
    with pytest.raises(grpc.RpcError) as refused:
        server.inference.Query(inference_pb2.QueryRequest(question="?", response_format=wanted))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in str(refused.value.details())
    check(running, ok=True)
