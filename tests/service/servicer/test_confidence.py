"""Confidences, certainties and alternatives on their way to callers, and what asks for them."""

from __future__ import annotations

from typing import Any

import pytest
from legato.v1 import geometry_pb2, inference_pb2, media_pb2, server_pb2, task_pb2
from legato_engine.ipc.messages import Delta
from legato_engine.types import (
    Alternative,
    CaptionLength,
    ConfidenceInfo,
    DetectResult,
    DetectTask,
    Event,
    FinishReason,
    Grounding,
    ObjectEvent,
    ObjectOrder,
    Outline,
    OutlineEvent,
    Point,
    PointEvent,
    PointResult,
    PointTask,
    QueryTask,
    ReasoningDelta,
    SegmentResult,
    SegmentTask,
    TaskResult,
    TokenInfo,
)

from tests.service.fakes import BOX, MODEL, POINT, FakeEngine, done, solution, started
from tests.service.harness import refusal, running
from tests.service.servicer.test_checkpoints import request as detection
from tests.service.servicer.test_generate import request

IMAGE = media_pb2.Image(image_id="img_1")
SURE = TokenInfo(token_id=5, logprob=-0.5, coordinate=0.5, certainty=(0.75, 0.5))
WORD = TokenInfo(
    token_id=9,
    text="cat",
    logprob=-0.25,
    alternatives=(
        Alternative(token_id=9, text="cat", logprob=-0.25),
        Alternative(token_id=8, text="dog", logprob=-2.0, piece=b"dog"),
    ),
)


def sure(engine, stream):
    """One object of a known confidence, with its tokens."""
    asked = stream.request
    about: dict[str, Any] = {"label": "cup", "confidence": 0.375}
    event: Event
    result: TaskResult
    match asked.task:
        case DetectTask():
            event = ObjectEvent(box=BOX, **about)
            result = DetectResult(objects=(event,))
        case PointTask():
            event = PointEvent(point=POINT, **about)
            result = PointResult(points=(event,))
        case _:
            event = OutlineEvent(index=0, box=BOX)
            result = SegmentResult(segments=(Outline(path="", box=BOX, **about),))
    told = Delta(
        request_id=asked.request_id,
        events=(event,),
        token_ids=(5,),
        payloads=((0.5, 0.0),),
        certainties=((0.75, 0.5),),
    )
    end = done(asked, result)
    engine.feed(stream, started(asked), told)
    engine.feed(stream, type(end)(**{**_fields(end), "tokens": (SURE, WORD)}))


def _fields(value):
    return {name: getattr(value, name) for name in value.__struct_fields__}


async def test_objects_have_their_confidence():
    """Of Detect, Point and Segment, in results and in events."""
    async with running(FakeEngine(sure)) as server:
        ask: dict[str, Any] = {"image": IMAGE, "object": "cup"}
        boxes = await server.inference.Detect(inference_pb2.DetectRequest(**ask))
        points = await server.inference.Point(inference_pb2.PointRequest(**ask))
        outlines = await server.inference.Segment(inference_pb2.SegmentRequest(**ask))
        events = [each async for each in server.inference.Generate(request("detect"))]
    (event,) = (each.object for each in events if each.HasField("object"))
    found = [*boxes.objects, *points.points, *outlines.segments, event]
    assert [each.confidence for each in found] == [0.375] * 4


async def test_unknown_confidences_stay_absent():
    """An object without one says nothing, rather than 0."""
    async with running() as server:
        boxes = await server.inference.Detect(
            inference_pb2.DetectRequest(image=IMAGE, object="cup")
        )
    assert not boxes.objects[0].HasField("confidence")


async def test_tokens_have_certainties_and_alternatives():
    """As the engine told them; tokens without either have none."""
    async with running(FakeEngine(sure)) as server:
        asked = inference_pb2.DetectRequest(image=IMAGE, object="cup")
        asked.options.top_logprobs = 2
        response = await server.inference.Detect(asked)
        assert server.engine.requests[-1].top_logprobs == 2
    place, word = response.info.tokens
    assert (place.certainty.existence, place.certainty.concentration) == (0.75, 0.5)
    assert not place.alternatives
    assert not word.HasField("certainty")
    assert [(a.token_id, a.text, a.logprob, a.bytes) for a in word.alternatives] == [
        (9, "cat", -0.25, b""), (8, "dog", -2.0, b"dog"),
    ]  # fmt: skip


async def test_checkpoints_carry_certainties():
    """A stream tells them, and a resumption gives them to the engine if their number is right."""
    async with running(FakeEngine(sure)) as server:
        whole = inference_pb2.Checkpoint()
        async for event in server.inference.Generate(detection()):
            whole.MergeFrom(event.checkpoint)
        assert list(whole.certainties) == [0.75, 0.5]
        for certainties, expected in [([0.75, 0.5], ((0.75, 0.5),)), ([0.75], ()), ([], ())]:
            del whole.certainties[:]
            whole.certainties.extend(certainties)
            async for _ in server.inference.Generate(detection(resume_from=whole)):
                pass
            resumed = server.engine.requests[-1].resumed
            assert resumed is not None
            assert resumed.certainties == expected
        whole.certainties[:] = [1.5, 0.5]
        failed = await refusal(server.inference.Generate(detection(resume_from=whole)).read())
    assert failed.details["ErrorInfo"].metadata["field"] == "resume_from.certainties[0]"


async def test_filters_and_orders_reach_the_engine():
    """Of the unary requests and of tasks; absent ones keep all objects in the model's order."""
    by_confidence = task_pb2.OBJECT_ORDER_CONFIDENCE
    ask: dict[str, Any] = {"image": IMAGE, "object": "cup", "min_confidence": 0.5}
    ask["order"] = by_confidence
    tasks = [
        task_pb2.Task(detect=task_pb2.DetectTask(object="cup", min_confidence=0.25, max_objects=3)),
        task_pb2.Task(detect=task_pb2.DetectTask(object="cat", order=by_confidence)),
        task_pb2.Task(point=task_pb2.PointTask(object="cup", min_confidence=1, max_objects=2)),
        task_pb2.Task(
            point=task_pb2.PointTask(
                object="cat",
                order=task_pb2.OBJECT_ORDER_MODEL,
                spatial_refs=[geometry_pb2.SpatialRef(point=geometry_pb2.Point(x=0.5, y=0.5))],
            )
        ),
    ]
    async with running() as server:
        await server.inference.Detect(inference_pb2.DetectRequest(**ask))
        await server.inference.Point(inference_pb2.PointRequest(**ask))
        await server.inference.RunTasks(inference_pb2.RunTasksRequest(image=IMAGE, tasks=tasks))
        asked: list[Any] = [each.task for each in server.engine.requests]
    seen = [(each.min_confidence, each.order, each.max_objects) for each in asked]
    model, confidence = ObjectOrder.MODEL, ObjectOrder.CONFIDENCE
    assert seen == [
        (0.5, confidence, None), (0.5, confidence, None),
        (0.25, model, 3), (0.0, confidence, None), (1.0, model, 2), (0.0, model, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"min_confidence": -0.1}, "min_confidence"),
        ({"min_confidence": float("nan")}, "min_confidence"),
        ({"order": 9}, "order"),
        ({"options": {"top_logprobs": 21}}, "options.top_logprobs"),
    ],
)
async def test_what_is_out_of_range_is_refused(fields, field):
    """The error names the field, and for alternatives their limit."""
    async with running() as server:
        asked = inference_pb2.DetectRequest(image=IMAGE, object="cup", **fields)
        failed = await refusal(server.inference.Detect(asked))
    metadata = failed.details["ErrorInfo"].metadata
    assert (failed.reason, metadata["field"]) == ("INVALID_FIELD", field)
    assert metadata.get("limit", "20") == "20"


async def test_models_say_whether_confidences_are_calibrated():
    """Which tasks have one, which of them were fitted, on what, and when."""
    engine = FakeEngine()
    engine.model = type(MODEL)(
        **{
            **_fields(MODEL),
            "confidence": ConfidenceInfo(
                skills=("detect", "point"),
                calibrated=("detect",),
                fitted_on="scenes",
                fitted_at=1795564800,
            ),
        }
    )
    async with running(engine) as server:
        listed = await server.info.ListModels(server_pb2.ListModelsRequest())
    confidence = listed.models[0].confidence
    assert (list(confidence.tasks), list(confidence.calibrated_tasks)) == (
        ["detect", "point"],
        ["detect"],
    )
    assert confidence.fitted_on == "scenes"
    assert confidence.fitted_at.ToJsonString() == "2026-11-25T00:00:00Z"
    async with running() as server:
        listed = await server.info.ListModels(server_pb2.ListModelsRequest())
    assert not listed.models[0].HasField("confidence")


def parts(engine, stream):
    """Groundings, outlines and ends that are not the first or the usual ones."""
    asked = stream.request
    events, result = solution(asked.task)
    reason = FinishReason.LENGTH
    if isinstance(asked.task, SegmentTask):
        events = (OutlineEvent(index=1, box=BOX),)
        reason = FinishReason.MAX_OBJECTS
    if isinstance(asked.task, QueryTask):
        span = Grounding(start_index=1, end_index=2, points=(POINT,))
        events = (ReasoningDelta(text="Hm", grounding=(span,)),)
    told = Delta(request_id=asked.request_id, events=tuple(events))
    engine.feed(stream, started(asked), told, done(asked, result, reason))


async def test_every_part_of_a_request_reaches_the_engine():
    """Stamps come back; sampling, options, lengths and places are the engine's."""
    stamp = media_pb2.FrameStamp(sequence=4)
    about: dict[str, Any] = {
        "image": IMAGE,
        "stamp": stamp,
        "sampling": task_pb2.Sampling(max_tokens=3),
        "options": inference_pb2.RequestOptions(adapter="", request_id=""),
    }
    refs = [geometry_pb2.SpatialRef(point=geometry_pb2.Point(x=0.5, y=0.25))]
    short, long = task_pb2.CAPTION_LENGTH_SHORT, task_pb2.CAPTION_LENGTH_LONG
    async with running() as server:
        ask = server.inference
        answers = [
            await ask.Query(inference_pb2.QueryRequest(question="?", **about)),
            await ask.Caption(inference_pb2.CaptionRequest(length=short, **about)),
            await ask.Caption(
                inference_pb2.CaptionRequest(length=task_pb2.CAPTION_LENGTH_NORMAL, **about)
            ),
            await ask.Detect(inference_pb2.DetectRequest(object="cup", **about)),
            await ask.Point(inference_pb2.PointRequest(object="cup", **about)),
            await ask.Segment(
                inference_pb2.SegmentRequest(object="cup", spatial_refs=refs, **about)
            ),
        ]
        asked: list[Any] = list(server.engine.requests)
        tasks = [
            task_pb2.Task(caption=task_pb2.CaptionTask(length=long)),
            task_pb2.Task(segment=task_pb2.SegmentTask(object="cup", spatial_refs=refs)),
        ]
        together = await ask.RunTasks(
            inference_pb2.RunTasksRequest(image=IMAGE, tasks=tasks, stamp=stamp)
        )
        last: list[Any] = server.engine.requests[-2:]
    assert {each.info.stamp.sequence for each in (*answers, together)} == {4}
    assert {each.sampling.max_tokens for each in asked} == {3}
    lengths = [each.task.length for each in (asked[1], asked[2], last[0])]
    assert lengths == [CaptionLength.SHORT, CaptionLength.NORMAL, CaptionLength.LONG]
    place = (Point(x=0.5, y=0.25),)
    assert (asked[5].task.spatial_refs, last[1].task.spatial_refs) == (place, place)


async def test_later_outlines_spans_and_other_ends():
    """Indices that are not 0, and the ends by length and by the number of objects."""
    async with running(FakeEngine(parts)) as server:
        outlines = [each async for each in server.inference.Generate(request("segment"))]
        thoughts = [each async for each in server.inference.Generate(request("query"))]
    assert [each.outline.index for each in outlines if each.HasField("outline")] == [1]
    ends = [each[-1].finished.info.finish_reason for each in (outlines, thoughts)]
    assert ends == [task_pb2.FINISH_REASON_MAX_OBJECTS, task_pb2.FINISH_REASON_LENGTH]
    (span,) = next(each.reasoning for each in thoughts if each.HasField("reasoning")).grounding
    assert (span.start_index, span.end_index) == (1, 2)
