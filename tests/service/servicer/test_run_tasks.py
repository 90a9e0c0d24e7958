"""RunTasks: results in order, one image, errors by task."""

import grpc
import msgspec
import pytest
from google.rpc import error_details_pb2
from legato.v1 import inference_pb2, media_pb2, task_pb2
from legato_engine.errors import (
    EngineLost,
    ImageUndecodable,
    InternalError,
    PromptTooLong,
    QueueFull,
)
from legato_engine.types import CachedImage, CaptionTask, EncodedImage, QueryTask, TokenInfo

from tests.service.fakes import FakeEngine, answer, begin, done, solution, started
from tests.service.harness import image_message, refusal, running, until

QUERY = task_pb2.Task(task_id="q", query=task_pb2.QueryTask(question="How many?"))
CAPTION = task_pb2.Task(task_id="c", caption=task_pb2.CaptionTask())
DETECT = task_pb2.Task(task_id="d", detect=task_pb2.DetectTask(object="cup"))


def request(*tasks, image=True, **options):
    """Return a request of several tasks on one image."""
    return inference_pb2.RunTasksRequest(
        image=image_message() if image else None,
        tasks=tasks,
        options=inference_pb2.RequestOptions(**options),
    )


def failing(kind, error):
    """Fail tasks of one kind, complete the others."""

    def script(engine, stream):
        if isinstance(stream.request.task, kind):
            engine.fail(stream, error)
        else:
            answer(engine, stream)

    return script


async def test_results_keep_the_order_of_the_tasks():
    """Each task's result is at the task's place, under its id."""
    async with running() as server:
        response = await server.inference.RunTasks(request(DETECT, QUERY, CAPTION))
    assert [result.task_id for result in response.results] == ["d", "q", "c"]
    assert [result.WhichOneof("result") for result in response.results] == [
        "detect",
        "query",
        "caption",
    ]
    assert response.results[1].query.answer == "Three red cups."


async def test_tokens_are_listed_by_task():
    """Each task has its own tokens, a failed one none; without the option there is no list."""

    def script(engine, stream):
        engine_request = stream.request
        if isinstance(engine_request.task, CaptionTask):
            engine.fail(stream, PromptTooLong("too long"))
            return
        tokens = (TokenInfo(token_id=len(engine_request.request_id.name), logprob=-1.0),)
        ended = msgspec.structs.replace(
            done(engine_request, solution(engine_request.task)[1]), tokens=tokens
        )
        engine.feed(stream, started(engine_request), ended)

    async with running(FakeEngine(script)) as server:
        message = request(DETECT, CAPTION, QUERY, top_logprobs=0, request_id="r")
        response = await server.inference.RunTasks(message)
        quiet = await server.inference.RunTasks(request(DETECT))
    logprobs = [[token.logprob for token in each.tokens] for each in response.tokens]
    assert logprobs == [[-1], [], [-1]]
    assert not response.info.tokens
    assert not quiet.tokens


async def test_the_images_bytes_are_sent_once():
    """The first task carries the image and has it cached; the others refer to it."""
    async with running() as server:
        await server.inference.RunTasks(request(DETECT, QUERY, CAPTION, cache_image=False))
        images = [engine_request.image for engine_request in server.engine.requests]
        assert all(engine_request.cache_image for engine_request in server.engine.requests)
    assert isinstance(images[0], EncodedImage)
    assert images[1:] == [CachedImage(image_id="img_0")] * 2


async def test_all_tasks_run_at_the_same_time():
    """After the start of the first, the others are submitted without waiting for its end."""
    engine = FakeEngine(begin)
    async with running(engine) as server:
        call = server.inference.RunTasks(request(DETECT, QUERY, CAPTION))
        await until(lambda: len(engine.streams) == 3)
        call.cancel()
        await until(lambda: not engine.streams)
    assert len(engine.aborted) == 3


async def test_the_call_has_the_sum():
    """Usage is added up; of the timings only image and total are set."""
    async with running() as server:
        info = (await server.inference.RunTasks(request(QUERY, CAPTION))).info
    assert info.usage.output_tokens == 18
    assert info.timings.image.ToMilliseconds() == 2
    assert info.timings.HasField("total")
    assert not info.timings.HasField("decode")
    assert info.finish_reason == task_pb2.FINISH_REASON_UNSPECIFIED
    assert info.image.image_id == "img_0"


async def test_a_task_may_fail_alone():
    """A failed task has its own status with all details; its siblings have their results."""
    script = failing(QueryTask, PromptTooLong("too long", limit=2048, actual=3000))
    async with running(FakeEngine(script)) as server:
        response = await server.inference.RunTasks(request(QUERY, DETECT, request_id="r"))
        carrier = server.engine.requests[1].image
    status = response.results[0].error
    info, about = error_details_pb2.ErrorInfo(), error_details_pb2.RequestInfo()
    found = [detail for detail in status.details if detail.Unpack(info)]
    assert found
    assert info.reason == "PROMPT_TOO_LONG"
    assert info.metadata["limit"] == "2048"
    assert any(detail.Unpack(about) for detail in status.details)
    assert about.request_id == "r"
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert response.results[0].task_id == "q"
    assert len(response.results[1].detect.objects) == 2
    assert isinstance(carrier, EncodedImage), "the next task brings the picture instead"


async def test_the_text_of_a_bug_in_one_task_is_not_sent():
    """INTERNAL of a task carries no text of the error."""
    script = failing(QueryTask, InternalError("row 3 was not finite"))
    async with running(FakeEngine(script)) as server:
        response = await server.inference.RunTasks(request(QUERY, DETECT))
    status = response.results[0].error
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    assert b"row 3" not in status.SerializeToString()


async def test_without_an_image_only_questions_succeed():
    """A task that needs an image fails by itself without one."""
    async with running() as server:
        response = await server.inference.RunTasks(request(QUERY, CAPTION, image=False))
    assert response.results[0].query.answer
    assert response.results[1].error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ImageUndecodable("truncated"), grpc.StatusCode.INVALID_ARGUMENT),
        (EngineLost("died"), grpc.StatusCode.UNAVAILABLE),
        (QueueFull("full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_what_all_tasks_share_fails_the_call(error, code):
    """A bad image, a lost engine or a full queue fails the call, and no task runs on."""
    engine = FakeEngine(failing(CaptionTask, error))
    async with running(engine) as server:
        failed = await refusal(server.inference.RunTasks(request(QUERY, CAPTION, DETECT)))
        assert not engine.streams
    assert failed.code is code


async def test_a_named_image_needs_no_first_task():
    """All tasks refer to the image that the client named."""
    named = request(QUERY, CAPTION, image=False)
    named.image.CopyFrom(media_pb2.Image(image_id="img_9"))
    async with running() as server:
        await server.inference.RunTasks(named)
        images = {engine_request.image for engine_request in server.engine.requests}
    assert images == {CachedImage(image_id="img_9")}


@pytest.mark.parametrize(
    ("tasks", "field"),
    [
        ([], "tasks"),
        ([CAPTION] * 33, "tasks"),
        ([QUERY, QUERY], "tasks[1].task_id"),
        ([QUERY, task_pb2.Task()], "tasks[1]"),
        ([task_pb2.Task(task_id="x" * 65, caption=task_pb2.CaptionTask())], "tasks[0].task_id"),
        ([QUERY, task_pb2.Task(detect=task_pb2.DetectTask())], "tasks[1].detect.object"),
        (
            [
                task_pb2.Task(
                    caption=task_pb2.CaptionTask(), sampling=task_pb2.Sampling(max_tokens=10_000)
                )
            ],
            "tasks[0].sampling.max_tokens",
        ),
    ],
)
async def test_a_malformed_list_fails_the_call(tasks, field):
    """The error names the field by its index in the list, and the engine gets nothing."""
    async with running() as server:
        failed = await refusal(server.inference.RunTasks(request(*tasks)))
        assert not server.engine.requests
    assert failed.details["BadRequest"].field_violations[0].field == field
