"""Unary RPCs, RunTasks and adapters in requests."""

from __future__ import annotations

import math

import grpc
import msgspec
import pytest
from google.protobuf import timestamp_pb2
from google.rpc import error_details_pb2
from legato.v1 import geometry_pb2, inference_pb2, media_pb2, server_pb2, task_pb2
from legato_engine.errors import (
    AdapterNotFound,
    AdapterUnusable,
    EngineLost,
    ImageUndecodable,
    InternalError,
    PromptTooLong,
    QueueFull,
)
from legato_engine.shm import BlobReader
from legato_engine.types import (
    CachedImageRef,
    CaptionOutput,
    CaptionSpec,
    EncodedImage,
    ImageBox,
    ImagePoint,
    PixelFormat,
    PointSpec,
    QuerySpec,
    RawImage,
    SamplingParams,
    TokenInfo,
)

from tests.service.fakes import (
    BOX,
    MODEL,
    FakeEngine,
    answer,
    begin,
    done,
    refuse,
    solution,
    started,
)
from tests.service.harness import image_bytes, image_message, refusal, running, until
from tests.service.session.client import session, settled


async def test_each_skill_gives_its_typed_result():
    """Query, Caption, Detect, Point and Segment respond with the engine's result."""
    async with running() as server:
        stub = server.inference
        query = await stub.Query(
            inference_pb2.QueryRequest(image=image_message(), question="How many?")
        )
        caption = await stub.Caption(inference_pb2.CaptionRequest(image=image_message()))
        detect = await stub.Detect(inference_pb2.DetectRequest(image=image_message(), object="cup"))
        point = await stub.Point(inference_pb2.PointRequest(image=image_message(), object="cup"))
        segment = await stub.Segment(
            inference_pb2.SegmentRequest(image=image_message(), object="cup")
        )
    assert query.answer == "Three red cups."
    assert not query.HasField("reasoning")
    assert caption.caption == "A shelf."
    assert [found.label for found in detect.objects] == ["cup", "cup"]
    assert detect.objects[0].box.y_max == BOX.y_max
    assert not detect.objects[0].HasField("confidence")
    assert point.points[0].point.x == 0.25
    assert segment.segments[0].path == "M 0 0 L 1 1 Z"
    assert segment.segments[0].coarse


async def test_reasoning_comes_back_only_when_asked_for():
    """Reasoning is a message of its own, present when there was any."""
    async with running() as server:
        response = await server.inference.Query(
            inference_pb2.QueryRequest(question="2+2?", reasoning=True)
        )
    assert response.answer == "Four."
    assert response.reasoning.text == "Hm. "


async def test_info_describes_the_request():
    """Id, model, finish reason, usage, timings, image and stamp come with every response."""
    stamp = media_pb2.FrameStamp(
        frame_id="cam", capture_time=timestamp_pb2.Timestamp(seconds=5), sequence=7
    )
    async with running() as server:
        call = server.inference.Detect(
            inference_pb2.DetectRequest(
                image=image_message(),
                object="cup",
                options=inference_pb2.RequestOptions(request_id="robot-1"),
                stamp=stamp,
            )
        )
        info = (await call).info
        assert ("x-request-id", "robot-1") in tuple(await call.trailing_metadata())
    assert info.request_id == "robot-1"
    assert info.model == "fake-1"
    assert info.finish_reason == task_pb2.FINISH_REASON_STOP
    assert (info.usage.input_tokens, info.usage.cached_tokens) == (740, 730)
    assert math.isclose(info.timings.total.ToNanoseconds(), 506_000_000)
    assert (info.image.image_id, info.image.width) == ("img_0", 640)
    assert info.stamp == stamp


async def test_a_request_without_stamp_gets_none_back():
    """An absent stamp stays absent."""
    async with running() as server:
        response = await server.inference.Query(inference_pb2.QueryRequest(question="Hi?"))
    assert not response.info.HasField("stamp")
    assert not response.info.HasField("image")


async def test_the_request_reaches_the_engine_as_asked():
    """Every field of a request arrives; absent ones arrive as None."""
    request = inference_pb2.PointRequest(
        image=image_message(),
        object="the left cup",
        max_objects=3,
        spatial_refs=[
            geometry_pb2.SpatialRef(point=geometry_pb2.Point(x=0.5, y=0.25)),
            geometry_pb2.SpatialRef(box=geometry_pb2.Box(x_min=0, y_min=0, x_max=1, y_max=1)),
        ],
        sampling=task_pb2.Sampling(temperature=0, top_p=0.5, top_k=4, max_tokens=5, seed=0),
        options=inference_pb2.RequestOptions(model="fake-1", cache_image=False),
    )
    async with running() as server:
        await server.inference.Point(request)
        (received,) = server.engine.requests
    assert received.task == PointSpec(
        object="the left cup",
        max_objects=3,
        spatial_refs=(
            ImagePoint(x=0.5, y=0.25),
            ImageBox(x_min=0, y_min=0, x_max=1, y_max=1),
        ),
    )
    assert received.sampling == SamplingParams(
        temperature=0, top_p=0.5, top_k=4, max_tokens=5, seed=0
    )
    assert received.model == "fake-1"
    assert not received.cache_image
    assert received.deadline is not None


async def test_absent_sampling_leaves_the_choice_to_the_model():
    """The service sets no field of Sampling itself."""
    async with running() as server:
        await server.inference.Query(inference_pb2.QueryRequest(question="Hi?"))
        (received,) = server.engine.requests
    assert received.sampling == SamplingParams()
    assert received.cache_image


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
async def test_image_bytes_reach_the_engine_through_shared_memory(kind):
    """A blob holds the file's bytes while the request runs, and is freed after it."""
    seen = []

    def look(engine, stream):
        reader = BlobReader(engine.blobs.namespace)
        seen.append(bytes(reader.take(stream.request.image.blob)))
        answer(engine, stream)

    data = image_bytes(kind)
    image = media_pb2.Image(encoded=media_pb2.EncodedImage(data=data))
    async with running(FakeEngine(look)) as server:
        await server.inference.Caption(inference_pb2.CaptionRequest(image=image))
        (received,) = server.engine.requests
        assert len(server.engine.blobs) == 0
    assert seen == [data]
    assert isinstance(received.image, EncodedImage)
    assert received.image.mime_type == f"image/{kind.lower()}"


async def test_raw_pixels_reach_the_engine_with_their_layout():
    """A stride of 0 means rows without padding; the last row need not be padded."""
    tight = media_pb2.PixelLayout(width=4, height=2, format=media_pb2.PIXEL_FORMAT_BGR8)
    padded = media_pb2.PixelLayout(
        width=4, height=2, row_stride_bytes=16, format=media_pb2.PIXEL_FORMAT_BGR8
    )
    async with running() as server:
        for layout, size in ((tight, 24), (padded, 28)):
            raw = media_pb2.RawImage(layout=layout, data=bytes(size))
            await server.inference.Caption(
                inference_pb2.CaptionRequest(image=media_pb2.Image(raw=raw))
            )
        images = [request.image for request in server.engine.requests]
    raw_images = [image for image in images if isinstance(image, RawImage)]
    assert [image.row_stride for image in raw_images] == [12, 16]
    assert {image.format for image in raw_images} == {PixelFormat.BGR8}


async def test_an_image_may_be_named_by_its_id():
    """An id from an earlier response stands for the image; no bytes are sent."""
    async with running() as server:
        response = await server.inference.Caption(
            inference_pb2.CaptionRequest(image=media_pb2.Image(image_id="img_7"))
        )
        assert server.engine.requests[0].image == CachedImageRef(image_id="img_7")
    assert response.info.image.cache_hit


async def test_a_result_of_the_wrong_kind_is_internal():
    """A caption as the result of a Detect is INTERNAL."""

    def confuse(engine, stream):
        request = stream.request
        engine.feed(stream, started(request), done(request, CaptionOutput(caption="?")))

    async with running(FakeEngine(confuse)) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.inference.Detect(
                inference_pb2.DetectRequest(image=image_message(), object="cup")
            )
    assert caught.value.code() is grpc.StatusCode.INTERNAL


# ---------------------------------------------------------------- run tasks
# RunTasks: results in order, one image, errors by task.

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
        if isinstance(engine_request.task, CaptionSpec):
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
    assert images[1:] == [CachedImageRef(image_id="img_0")] * 2


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
    script = failing(QuerySpec, PromptTooLong("too long", limit=2048, actual=3000))
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
    script = failing(QuerySpec, InternalError("row 3 was not finite"))
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
    engine = FakeEngine(failing(CaptionSpec, error))
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
    assert images == {CachedImageRef(image_id="img_9")}


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


# ---------------------------------------------------------------- adapters
# Adapters in requests: passed to the engine, and errors by field.

NAME = "cups@12"
DETECT_CUP = task_pb2.Task(detect=task_pb2.DetectTask(object="cup"))
OPTIONS = inference_pb2.RequestOptions(adapter=NAME)


def engine_of(script=answer):
    """Return an engine with adapters."""
    engine = FakeEngine(script)
    engine.model = msgspec.structs.replace(MODEL, adapters=True)
    return engine


async def test_every_rpc_passes_the_adapter_on():
    """Unary calls, streams, several tasks and sessions all pass the name on."""
    pb = inference_pb2
    async with running(engine_of()) as server:
        await server.inference.Query(pb.QueryRequest(question="?", options=OPTIONS))
        stream = server.inference.Generate(
            pb.GenerateRequest(task=DETECT_CUP, image=image_message(), options=OPTIONS)
        )
        assert [event async for event in stream]
        await server.inference.RunTasks(
            pb.RunTasksRequest(tasks=[DETECT_CUP], image=image_message(), options=OPTIONS)
        )
        async with session(server, adapter=NAME) as client:
            await client.frame(1)
            await client.outcome(1)
        assert [each.adapter for each in server.engine.requests] == [NAME] * 4


@pytest.mark.parametrize("adapters", [False, True])
async def test_the_capability_is_the_engines(adapters):
    """A server whose engine takes adapters announces them, any other does not."""
    engine = engine_of() if adapters else FakeEngine()
    async with running(engine) as server:
        info = await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())
    assert ("adapters" in info.capabilities) == adapters


ERRORS = [
    (AdapterNotFound("none", resource=NAME), "NOT_FOUND", "ADAPTER_NOT_FOUND"),
    (AdapterUnusable("its rank is 17"), "INVALID_ARGUMENT", "INVALID_FIELD"),
]


@pytest.mark.parametrize(("error", "code", "reason"), ERRORS)
async def test_what_is_wrong_with_an_adapter_fails_the_call(error, code, reason):
    """A bad adapter fails a call of one task or several, by its field in the options."""
    several = inference_pb2.RunTasksRequest(
        tasks=[DETECT_CUP, DETECT_CUP], image=image_message(), options=OPTIONS
    )
    single = inference_pb2.QueryRequest(question="?", options=OPTIONS)
    async with running(engine_of(refuse(error))) as server:
        for call in (server.inference.Query(single), server.inference.RunTasks(several)):
            failed = await refusal(call)
            assert (failed.code.name, failed.reason) == (code, reason)
            if code == "INVALID_ARGUMENT":
                (violation,) = failed.details["BadRequest"].field_violations
                assert violation.field == "options.adapter"
                assert "rank is 17" in failed.message


async def test_a_session_names_its_own_field():
    """In a session a bad adapter fails each task, by the field of the opening."""
    error = AdapterUnusable("its rank is 17")
    async with running(engine_of(refuse(error))) as server:
        async with session(server, adapter=NAME) as client:
            await client.frame(1)
            await client.outcome(1)
            assert "open.adapter: its rank is 17" in client.results[1][0].error.message
        await settled(server)
