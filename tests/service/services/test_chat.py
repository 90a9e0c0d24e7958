"""Conversations, and confidences on their way to callers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from legato.v1 import geometry_pb2, inference_pb2, limits, media_pb2, server_pb2, task_pb2
from legato_engine.errors import ImageUndecodable, QueueFull
from legato_engine.ipc.messages import OutputDelta
from legato_engine.types import (
    Alternative,
    CalibrationInfo,
    CaptionLength,
    DetectOutput,
    DetectSpec,
    Event,
    FinishReason,
    GroundedText,
    ImagePoint,
    MaskOutline,
    ObjectEvent,
    ObjectOrder,
    OutlineEvent,
    PointEvent,
    PointOutput,
    PointSpec,
    QuerySpec,
    ReasoningEvent,
    SegmentOutput,
    SegmentSpec,
    TaskOutput,
    TokenInfo,
    Turn,
)
from legato_service.convert import skills
from legato_service.convert.skills import MAX_TEXT_BYTES, ChatQuestion

from tests.grammar import replay
from tests.service.fakes import BOX, MODEL, POINT, FakeEngine, done, refuse, solution, started
from tests.service.harness import image_message, refusal, running
from tests.service.services.test_generate import request
from tests.service.services.test_generate import resumable as detection

SYSTEM, USER, ASSISTANT = (
    task_pb2.CHAT_ROLE_SYSTEM,
    task_pb2.CHAT_ROLE_USER,
    task_pb2.CHAT_ROLE_ASSISTANT,
)
SHOWN = task_pb2.ChatPart(image=task_pb2.ImagePart())


def said(role, *parts):
    """Return a message; strings are text."""
    wrapped = [task_pb2.ChatPart(text=each) if isinstance(each, str) else each for each in parts]
    return task_pb2.ChatMessage(role=role, parts=wrapped)


TALK = [
    said(SYSTEM, "Be short."),
    said(USER, SHOWN, "What", " is it?"),
    said(ASSISTANT, "A cup."),
    said(USER, "Of what colour?"),
]
TURNS = (Turn(question="What is it?", answer="A cup."),)


def field_of(failed):
    """Return the field of a refusal."""
    return failed.details["ErrorInfo"].metadata["field"]


async def test_a_conversation_reaches_the_engine():
    """Query and Generate pass on the system message, the earlier turns and the last question."""
    expected = QuerySpec(
        question="Of what colour?",
        reasoning=True,
        system="Be short.",
        history=TURNS,
        shows_image=True,
    )
    task = task_pb2.Task(query=task_pb2.QueryTask(messages=TALK, reasoning=True))
    async with running() as server:
        query = inference_pb2.QueryRequest(image=image_message(), messages=TALK, reasoning=True)
        assert (await server.inference.Query(query)).answer
        request = inference_pb2.GenerateRequest(image=image_message(), task=task)
        await replay(server.inference.Generate(request))
        assert [each.task for each in server.engine.requests] == [expected, expected]


async def test_one_question_is_a_conversation():
    """A single user message equals the question alone."""
    async with running() as server:
        for request in ({"question": "Hi?"}, {"messages": [said(USER, "Hi?")]}):
            await server.inference.Query(inference_pb2.QueryRequest(**request))
        first, second = (each.task for each in server.engine.requests)
    assert first == second == QuerySpec(question="Hi?")


async def test_messages_of_one_role_in_a_row_are_a_turn():
    """Their texts are joined by blank lines: clients leave out answers that are empty."""
    messages = [
        said(SYSTEM, "Be short."),
        said(SYSTEM, "Be kind."),
        said(USER, SHOWN),
        said(USER, "What", " is it?"),
        said(ASSISTANT, ""),
        said(ASSISTANT, "A cup."),
        said(USER, "Of what"),
        said(USER, "colour?"),
    ]
    async with running() as server:
        query = inference_pb2.QueryRequest(image=image_message(), messages=messages)
        assert (await server.inference.Query(query)).answer
        (asked,) = (each.task for each in server.engine.requests)
    assert asked == QuerySpec(
        question="Of what\n\ncolour?",
        system="Be short.\n\nBe kind.",
        history=TURNS,
        shows_image=True,
    )


@pytest.mark.parametrize("empty", [(), ("",), (" ", "\n")])
async def test_messages_that_may_be_empty(empty):
    """An empty answer and an empty system message are read, and an image without text."""
    messages = [said(SYSTEM, *empty), said(USER, SHOWN, *empty), said(ASSISTANT, *empty)]
    async with running() as server:
        query = inference_pb2.QueryRequest(image=image_message(), messages=[*messages, TALK[-1]])
        assert (await server.inference.Query(query)).answer
        (asked,) = (each.task for each in server.engine.requests)
    assert isinstance(asked, QuerySpec)
    assert (asked.system.strip(), asked.question) == ("", "Of what colour?")
    assert [(turn.question.strip(), turn.answer.strip()) for turn in asked.history] == [("", "")]
    assert asked.shows_image


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([said(ASSISTANT, "a")], "messages[0].role"),
        ([said(0, "a")], "messages[0].role"),
        ([said(99, "a")], "messages[0].role"),
        ([said(USER, "a"), said(SYSTEM, "b"), said(USER, "c")], "messages[1].role"),
        ([said(SYSTEM, "a"), said(ASSISTANT, "b"), said(USER, "c")], "messages[1].role"),
        ([said(SYSTEM, "a")], "messages"),
        ([said(USER, "a"), said(ASSISTANT, "b")], "messages"),
        ([said(USER, " ")], "messages[0].parts"),
        ([said(USER)], "messages[0].parts"),
        ([said(USER, "a"), said(ASSISTANT, "b"), said(USER, "")], "messages[2].parts"),
        ([said(USER, "a", task_pb2.ChatPart())], "messages[0].parts[1]"),
        ([said(USER, SHOWN, SHOWN, "a")], "messages[0].parts[1].image"),
        ([said(SYSTEM, SHOWN, "a"), said(USER, "b")], "messages[0].parts[0].image"),
        (
            [said(USER, "a"), said(ASSISTANT, "b", SHOWN), said(USER, "c")],
            "messages[1].parts[1].image",
        ),
        ([said(USER, "a"), said(ASSISTANT, "b")] * 128 + [said(USER, "c")], "messages"),
    ],
)
async def test_what_makes_no_conversation(messages, field):
    """Wrong order, empty messages and misplaced images are refused by field."""
    async with running() as server:
        query = inference_pb2.QueryRequest(image=image_message(), messages=messages)
        failed = await refusal(server.inference.Query(query))
        task = task_pb2.Task(query=task_pb2.QueryTask(messages=messages))
        request = inference_pb2.GenerateRequest(image=image_message(), task=task)
        streamed = await refusal(replay(server.inference.Generate(request)))
        assert not server.engine.requests
    assert (failed.code.name, failed.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert field_of(failed) == field
    assert field_of(streamed) == f"task.query.{field}"


async def test_messages_stand_in_place_of_the_question():
    """Both together are refused, and so is a reference to an absent image."""
    both = inference_pb2.QueryRequest(question="a", messages=[said(USER, "b")])
    absent = inference_pb2.QueryRequest(messages=[said(USER, SHOWN, "b")])
    async with running() as server:
        fields = []
        for request in (both, absent):
            failed = await refusal(server.inference.Query(request))
            fields.append((failed.reason, field_of(failed)))
    assert fields == [("INVALID_FIELD", "question"), ("INVALID_FIELD", "image")]


async def test_texts_are_limited_in_bytes():
    """A question, and all messages together, have the documented length in UTF-8 and no more."""
    longest = "é" * (MAX_TEXT_BYTES // 2)
    talk = [said(USER, longest[2:]), said(ASSISTANT, "é"), said(USER, "é")]
    async with running() as server:
        await server.inference.Query(inference_pb2.QueryRequest(question=longest))
        await server.inference.Query(inference_pb2.QueryRequest(messages=talk))
        more = [*talk[:2], said(USER, "é?")]
        for field, request in (
            ("question", inference_pb2.QueryRequest(question=f"{longest}?")),
            ("messages", inference_pb2.QueryRequest(messages=more)),
        ):
            failed = await refusal(server.inference.Query(request))
            assert (failed.reason, field_of(failed)) == ("PROMPT_TOO_LONG", field)
            metadata = failed.details["ErrorInfo"].metadata
            assert metadata["limit"] == str(MAX_TEXT_BYTES) == str(1024 * 1024)
            assert metadata["actual"] == str(MAX_TEXT_BYTES + 1)


def test_the_longest_conversation():
    """As many messages as are allowed are read in order."""
    most = limits.FIELDS["QueryTask"]["messages"].max_items or 0
    turns = [said(role, str(at)) for at, role in enumerate([USER, ASSISTANT] * (most // 2))]
    read = skills.conversation([said(SYSTEM, "s"), *turns[:-1]], "messages")
    assert isinstance(read, ChatQuestion)
    assert read.system == "s"
    assert read.question == str(most - 2)
    pairs = [(str(at), str(at + 1)) for at in range(0, most - 2, 2)]
    assert [(turn.question, turn.answer) for turn in read.history] == pairs
    assert not read.places


# ---------------------------------------------------------------- several images

NO_IMAGE = media_pb2.Image(encoded=media_pb2.EncodedImage(data=b"no image"))
SEVERAL = msgspec.structs.replace(MODEL, max_images=3)


def several(*times, **fields):
    """Return a query about an image for each time, which None leaves out."""
    images = [task_pb2.QueryImage(image=image_message()) for _ in times]
    for image, time in zip(images, times, strict=True):
        if time is not None:
            image.time.FromNanoseconds(int(time * 1e9))
    return inference_pb2.QueryRequest(images=images, **fields)


@pytest.fixture
async def server():
    """A server whose model takes three images."""
    engine = FakeEngine()
    engine.model = SEVERAL
    async with running(engine) as server:
        yield server


async def test_several_images_reach_the_engine_in_order(server):
    """Each with its bytes; without parts or times they stand before the question."""
    query = several(None, None, question="Which is larger?")
    named = media_pb2.Image(image_id="img_kept")
    query.images.insert(1, task_pb2.QueryImage(image=named))
    answered = await server.inference.Query(query)
    (asked,) = server.engine.requests
    kinds = [type(each).__name__ for each in asked.images]
    assert kinds == ["EncodedImage", "CachedImageRef", "EncodedImage"]
    assert len({blob.name for blob in asked.blobs}) == 2
    assert asked.task == QuerySpec(question="Which is larger?")
    assert len(answered.info.images) == 3
    assert answered.info.images[0] == answered.info.image


async def test_an_image_that_the_engine_cannot_read_is_one_of_the_images(server):
    """The error names their field, whether the first one is new or not."""
    server.engine.script = refuse(ImageUndecodable("cut"))
    query = several(None, None, question="a")
    query.images[0].image.CopyFrom(media_pb2.Image(image_id="img_kept"))
    failed = await refusal(server.inference.Query(query))
    assert (failed.reason, field_of(failed)) == ("IMAGE_UNDECODABLE", "images")


async def test_images_that_cannot_all_be_staged_leave_no_blob(server, monkeypatch):
    """Shared memory that is full at the second takes the first away."""
    blobs, put = server.engine.blobs, server.engine.blobs.put
    before = len(blobs)

    def fill(data):
        monkeypatch.setattr(blobs, "put", full)
        return put(data)

    def full(data):
        raise QueueFull("shared memory is full")

    monkeypatch.setattr(blobs, "put", fill)
    failed = await refusal(server.inference.Query(several(None, None, question="a")))
    assert failed.reason == "QUEUE_FULL"
    assert (len(blobs), server.engine.requests) == (before, [])


@pytest.mark.parametrize(
    ("messages", "places"),
    [
        ([said(USER, SHOWN, SHOWN, "Compare.")], [(0, 0), (0, 0)]),
        ([said(USER, "One:", SHOWN, "two:", SHOWN)], [(0, 4), (0, 8)]),
        ([said(USER, "é", SHOWN), said(USER, "b", SHOWN, "c")], [(0, 1), (0, 4)]),
        ([said(USER, SHOWN, "a"), said(ASSISTANT, "b"), said(USER, "c", SHOWN)], [(0, 0), (1, 1)]),
        ([said(SYSTEM, "s"), said(USER, SHOWN), said(USER, "b", SHOWN)], [(0, 0), (0, 1)]),
        ([said(USER, " ", SHOWN), said(USER, "b", SHOWN)], [(0, 0), (0, 1)]),
        ([said(USER, "b", SHOWN), said(USER, " ", SHOWN), said(USER, "c")], [(0, 1), (0, 1)]),
        ([said(USER, " ", SHOWN, SHOWN)], [(0, 1), (0, 1)]),
    ],
)
async def test_images_stand_where_the_messages_show_them(server, messages, places):
    """Counted in characters of the turn's text, in Query and in Generate."""
    query = several(None, None, messages=messages)
    await server.inference.Query(query)
    task = task_pb2.QueryTask(messages=messages, images=query.images)
    request = inference_pb2.GenerateRequest(task=task_pb2.Task(query=task))
    await replay(server.inference.Generate(request))
    first, second = (each.task for each in server.engine.requests)
    assert isinstance(first, QuerySpec)
    assert isinstance(second, QuerySpec)
    assert first.shows_image
    for asked in (first, second):
        shown = [(place.turn, place.offset) for place in asked.places]
        assert (shown or [(0, 0)] * 2) == places
    fields = [place.field for place in second.places]
    assert all(field.startswith("task.query.messages[") for field in fields)


async def test_the_frames_of_a_clip_have_their_times(server):
    """Beside a still; each frame is later than the one before."""
    await server.inference.Query(several(None, 0.5, 1.25, question="What moved?"))
    (asked,) = (each.task for each in server.engine.requests)
    assert [each.time for each in asked.places] == [None, 0.5, 1.25]
    failed = await refusal(server.inference.Query(several(None, 1.0, 1.0, question="What?")))
    assert (failed.reason, field_of(failed)) == ("INVALID_FIELD", "images[2].time")


@pytest.mark.parametrize(
    ("query", "field"),
    [
        (several(None, None, None, None, question="a"), "images"),
        (several(None, question="a", image=image_message()), "images"),
        (several(None, None, messages=[said(USER, SHOWN, "a")]), "messages"),
        (
            inference_pb2.QueryRequest(question="a", images=[task_pb2.QueryImage()]),
            "images[0].image",
        ),
        (several(None, 1e6, question="a"), "images[1].time"),
        (
            inference_pb2.QueryRequest(
                question="a",
                images=[
                    task_pb2.QueryImage(image=image_message()),
                    task_pb2.QueryImage(image=NO_IMAGE),
                ],
            ),
            "images[1].image.encoded.data",
        ),
    ],
)
async def test_images_that_make_no_query(server, query, field):
    """Too many, two kinds at once, too few parts, and an image that is none, by field."""
    failed = await refusal(server.inference.Query(query))
    assert field_of(failed) == field
    assert not server.engine.requests


async def test_queries_of_a_shared_image_bring_none(server):
    """In RunTasks, whose tasks are about one image."""
    query = task_pb2.QueryTask(question="a", images=several(None).images)
    task = task_pb2.Task(query=query)
    request = inference_pb2.RunTasksRequest(image=image_message(), tasks=[task])
    failed = await refusal(server.inference.RunTasks(request))
    assert (failed.reason, field_of(failed)) == ("INVALID_FIELD", "tasks[0].query.images")


async def test_a_model_of_one_image_refuses_two():
    """Before their bytes go to the engine."""
    async with running() as server:
        failed = await refusal(server.inference.Query(several(None, None, question="a")))
        assert (failed.reason, field_of(failed)) == ("INVALID_FIELD", "images")
        assert not server.engine.requests


# ---------------------------------------------------------------- confidence
# Confidences, certainties and alternatives on their way to callers, and what asks for them.

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
    result: TaskOutput
    match asked.task:
        case DetectSpec():
            event = ObjectEvent(box=BOX, **about)
            result = DetectOutput(objects=(event,))
        case PointSpec():
            event = PointEvent(point=POINT, **about)
            result = PointOutput(points=(event,))
        case _:
            event = OutlineEvent(index=0, box=BOX)
            result = SegmentOutput(segments=(MaskOutline(path="", box=BOX, **about),))
    told = OutputDelta(
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
            "confidence": CalibrationInfo(
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
    if isinstance(asked.task, SegmentSpec):
        events = (OutlineEvent(index=1, box=BOX),)
        reason = FinishReason.MAX_OBJECTS
    if isinstance(asked.task, QuerySpec):
        span = GroundedText(start_index=1, end_index=2, points=(POINT,))
        events = (ReasoningEvent(text="Hm", grounding=(span,)),)
    told = OutputDelta(request_id=asked.request_id, events=tuple(events))
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
    place = (ImagePoint(x=0.5, y=0.25),)
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
