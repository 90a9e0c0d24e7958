"""Unary RPCs."""

import math

import grpc
import pytest
from google.protobuf import timestamp_pb2
from legato.v1 import geometry_pb2, inference_pb2, media_pb2, task_pb2
from legato_engine.shm import BlobReader
from legato_engine.types import (
    Box,
    CachedImage,
    CaptionResult,
    EncodedImage,
    PixelFormat,
    Point,
    PointTask,
    RawImage,
    SamplingParams,
)

from tests.service.fakes import BOX, FakeEngine, answer, done, started
from tests.service.harness import image_bytes, image_message, running


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
    assert received.task == PointTask(
        object="the left cup",
        max_objects=3,
        spatial_refs=(
            Point(x=0.5, y=0.25),
            Box(x_min=0, y_min=0, x_max=1, y_max=1),
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
        assert server.engine.requests[0].image == CachedImage(image_id="img_7")
    assert response.info.image.cache_hit


async def test_a_result_of_the_wrong_kind_is_internal():
    """A caption as the result of a Detect is INTERNAL."""

    def confuse(engine, stream):
        request = stream.request
        engine.feed(stream, started(request), done(request, CaptionResult(caption="?")))

    async with running(FakeEngine(confuse)) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.inference.Detect(
                inference_pb2.DetectRequest(image=image_message(), object="cup")
            )
    assert caught.value.code() is grpc.StatusCode.INTERNAL
