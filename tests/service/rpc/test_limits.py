"""The bounds of requests, checked on their bytes."""

import gc
import math
import random
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from grpc_reflection.v1alpha import reflection_pb2
from legato.kserve import open_inference_pb2
from legato.v1 import (
    geometry_pb2,
    image_pb2,
    inference_pb2,
    limits,
    media_pb2,
    server_pb2,
    session_pb2,
    task_pb2,
)
from legato_client._grpc.channel import to_bytes
from legato_engine.errors import InvalidField, InvalidRequest, PromptTooLong
from legato_service.rpc.limits import FOREIGN_MAX_BYTES, kind_of

from tests.contract import schema
from tests.fuzz.messages import mutate
from tests.fuzz.seeds import messages as seeds
from tests.service.harness import refusal, running, until

MEGABYTE = 1 << 20
QUERY, TASK = inference_pb2.QueryRequest, task_pb2.Task


def check(message, data=None):
    """Check a message, or other bytes as one of its type."""
    kind_of(message.DESCRIPTOR).check(message.SerializeToString() if data is None else data)


def refused(message, data=None):
    """Return the field that a message is refused for, and the error."""
    with pytest.raises(InvalidRequest) as caught:
        check(message, data)
    return caught.value.metadata.get("field"), caught.value


def holding(number, body):
    """Return a length-delimited field."""
    size, digits = len(body), b""
    while size > 0x7F:
        digits += bytes((size & 0x7F | 0x80,))
        size >>= 7
    return bytes((number << 3 | 2,)) + digits + bytes((size,)) + body


def seconds(value, nanos=0):
    """Return a duration, valid or not."""
    options = inference_pb2.RequestOptions()
    options.heartbeat_interval.seconds = value
    options.heartbeat_interval.nanos = nanos
    return QUERY(options=options)


def captured(value, nanos=0):
    """Return a request with this capture time, valid or not."""
    request = QUERY()
    request.stamp.capture_time.seconds = value
    request.stamp.capture_time.nanos = nanos
    return request


def resuming(**fields):
    """Return a Generate with this checkpoint."""
    return inference_pb2.GenerateRequest(resume_from=inference_pb2.Checkpoint(**fields))


def asking(**fields):
    """Return a Query with this sampling."""
    return QUERY(sampling=task_pb2.Sampling(**fields))


PART = task_pb2.ChatPart(text="x")
REF = geometry_pb2.SpatialRef(point=geometry_pb2.Point())
WITHIN = [
    QUERY(spatial_refs=[REF] * 64),
    QUERY(messages=[task_pb2.ChatMessage(parts=[PART] * 64)] * 100),
    QUERY(question="\N{EURO SIGN}" * 262_144),
    captured(253_402_300_799),
    captured(-62_135_596_800),
    seconds(315_576_000_000),
    asking(temperature=0, top_p=1, seed=2**64 - 1, top_k=2**32 - 1, stop=["x" * 64] * 8),
    resuming(token_ids=[2**32 - 1] * 32_768, values=[0.5] * 65_536),
    QUERY(image=media_pb2.Image(encoded=media_pb2.EncodedImage(data=bytes(20 * MEGABYTE)))),
    session_pb2.SessionRequest(open=session_pb2.SessionOpen(session_name="x" * 64)),
]
BEYOND = [
    ("messages[0].parts", QUERY(messages=[task_pb2.ChatMessage(parts=[PART] * 65)])),
    ("messages", QUERY(messages=[task_pb2.ChatMessage()] * 257)),
    ("spatial_refs", QUERY(spatial_refs=[REF] * 65)),
    ("question", QUERY(question="x" * (MEGABYTE + 1))),
    ("question", QUERY(question="x" * 2 * MEGABYTE)),
    ("stamp.frame_id", QUERY(stamp=media_pb2.FrameStamp(frame_id="x" * 257))),
    ("stamp.capture_time", captured(253_402_300_800)),
    ("stamp.capture_time", captured(-(2**63))),
    ("stamp.capture_time", captured(0, -1)),
    ("options.heartbeat_interval", seconds(2**63 - 1)),
    ("options.heartbeat_interval", seconds(0)),
    ("options.heartbeat_interval", seconds(0, -1)),
    ("options.top_logprobs", QUERY(options=inference_pb2.RequestOptions(top_logprobs=21))),
    ("sampling.temperature", asking(temperature=math.nan)),
    ("sampling.top_p", asking(top_p=0)),
    ("sampling.max_tokens", asking(max_tokens=0)),
    ("sampling.stop[1]", asking(stop=["x", "x" * 65])),
    ("page_size", server_pb2.ListModelsRequest(page_size=-1)),
    ("resume_from.values[1]", resuming(values=[1, 1.5])),
    ("resume_from.logprobs[2]", resuming(logprobs=[-1, 0, -math.inf])),
    ("resume_from.token_ids", resuming(token_ids=[300] * 32_769)),
    ("header.sha256", image_pb2.PutImageRequest(header=image_pb2.PutImageHeader(sha256=bytes(33)))),
    (
        "tasks[1].detect.min_confidence",
        inference_pb2.RunTasksRequest(
            tasks=[TASK(), TASK(detect=task_pb2.DetectTask(min_confidence=1.5))]
        ),
    ),
    (
        "frame.stamp.capture_time",
        session_pb2.SessionRequest(frame=session_pb2.Frame(stamp=captured(2**62).stamp)),
    ),
    (
        "open.standing_tasks[0].detect.tracking.max_unseen",
        session_pb2.SessionRequest(
            open=session_pb2.SessionOpen(
                standing_tasks=[
                    TASK(
                        detect=task_pb2.DetectTask(
                            tracking=task_pb2.Tracking(
                                max_unseen=seconds(61).options.heartbeat_interval
                            )
                        )
                    )
                ]
            )
        ),
    ),
]


@pytest.mark.parametrize("message", WITHIN, ids=lambda message: type(message).__name__)
def test_a_message_at_its_bounds_is_accepted(message):
    """The greatest counts, lengths and numbers pass."""
    check(message)


@pytest.mark.parametrize(("field", "message"), BEYOND, ids=[field for field, _ in BEYOND])
def test_a_message_beyond_a_bound_is_refused_by_its_field(field, message):
    """The error names the field, whatever its depth."""
    assert refused(message)[0] == field


def test_a_long_prompt_is_told_apart():
    """PROMPT_TOO_LONG is for texts of the prompt, INVALID_FIELD for others."""
    assert type(refused(QUERY(question="x" * (MEGABYTE + 1)))[1]) is PromptTooLong
    assert type(refused(QUERY(stamp=media_pb2.FrameStamp(frame_id="x" * 257)))[1]) is InvalidField


@pytest.mark.parametrize(
    ("field", "data"),
    [
        ("messages[0].parts", holding(8, b"\x12\x00" * 4_000_000)),
        ("messages", b"\x42\x00" * 8_000_000),
        ("spatial_refs", b"\x22\x00" * 8_000_000),
        ("sampling", holding(5, b"\x18\x01" * 8_000_000)),
        ("stamp", holding(7, holding(3, b"") * 100_000)),
        ("", b"\xfa\x07\x00" * 5_000_000),
    ],
)
def test_millions_of_entries_are_not_walked(field, data, monkeypatch):
    """What a parser would take a second for is refused after as many entries as are allowed."""
    looks = 0
    kind = kind_of(QUERY.DESCRIPTOR)

    class Counted(dict[int, object]):
        def get(self, tag, default=None):
            nonlocal looks
            looks += 1
            return super().get(tag, default)

    monkeypatch.setattr(kind, "_fields", Counted(kind._fields))
    assert refused(QUERY(), data)[0] == field
    assert looks <= limits.MAX_FIELDS


def test_lists_are_counted_over_messages_that_a_parser_merges():
    """A bound cannot be passed by giving a message in several parts."""
    half = asking(stop=["x"] * 5).SerializeToString()
    check(asking(), half)
    assert refused(asking(), half + half)[0] == "sampling.stop"
    packed = resuming(token_ids=[1] * 20_000).SerializeToString()
    assert refused(resuming(), packed + packed)[0] == "resume_from.token_ids"
    late = captured(5).SerializeToString() + captured(0, 9).SerializeToString()
    assert refused(captured(0), late)[0] == "stamp.capture_time"


def test_a_frames_own_faults_are_left_to_the_frame():
    """Tasks and image of a frame fail alone, so that the session goes on."""
    task = TASK(task_id="x" * 65, detect=task_pb2.DetectTask(min_confidence=7))
    frame = session_pb2.Frame(extra_tasks=[task] * 33)
    frame.image.image_id = "x" * 1000
    check(session_pb2.SessionRequest(frame=frame))
    with pytest.raises(InvalidField, match="more than"):
        check(
            session_pb2.SessionRequest(),
            holding(2, b"\x1a\x00" * 100_000),
        )


def test_only_images_may_be_large():
    """Two megabytes bound a message without its image, and its largest field is named."""
    data = bytes(3 * MEGABYTE)
    encoded = media_pb2.Image(encoded=media_pb2.EncodedImage(data=data))
    check(QUERY(image=encoded, question="?"))
    check(QUERY(), to_bytes(QUERY(image=encoded, question="?")))  # as the client sends it
    field, error = refused(QUERY(), holding(2, bytes(100)) + holding(15, data))
    assert field == ""
    assert error.metadata["limit"] == str(2 * MEGABYTE)
    assert refused(inference_pb2.CaptionRequest(), holding(15, bytes(70_000)))[0] == ""
    foreign = reflection_pb2.ServerReflectionRequest
    check(foreign(file_by_filename="x" * 1000))
    refused(foreign(file_by_filename="x" * FOREIGN_MAX_BYTES))


def test_damaged_bytes_are_refused_as_by_the_parser():
    """What the check accepts of 20,000 mutants, the parser may refuse; nothing else is raised."""
    chance = random.Random(16)
    found = [message for sent in seeds().values() for message in sent]
    for number in range(20_000):
        message = found[number % len(found)]
        data = mutate(message.SerializeToString(), chance)
        try:
            check(message, data)
        except InvalidRequest:
            continue


def requested() -> Iterator[Descriptor]:
    """Every message that a request of the contract may hold."""
    modules = (inference_pb2, image_pb2, server_pb2, session_pb2)
    waiting = [
        method.input_type
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    seen: set[str] = set()
    while waiting:
        descriptor = waiting.pop()
        if descriptor.full_name not in seen:
            seen.add(descriptor.full_name)
            yield descriptor
            inner = (field.message_type for field in descriptor.fields)
            waiting += [each for each in inner if each is not None and each.file.package]


def test_every_field_of_a_request_has_its_bounds():
    """No number, text, bytes or list of a request is without a documented bound."""
    free = (FieldDescriptor.CPPTYPE_BOOL, FieldDescriptor.CPPTYPE_ENUM)
    bare = []
    for message in requested():
        if message.file.package != "legato.v1":
            continue
        for field in message.fields:
            bounds = limits.FIELDS.get(message.name, {}).get(field.name)
            is_time = field.message_type is not None and field.message_type.file.package != (
                "legato.v1"
            )
            has_range = field.message_type is None and field.cpp_type not in free
            if (has_range or is_time or field.is_repeated) and bounds is None:
                bare.append(f"{message.name}.{field.name}")
            elif field.is_repeated and bounds is not None and bounds.max_items is None:
                bare.append(f"{message.name}.{field.name}: max_items")
    assert bare == []


def test_the_table_is_that_of_the_contract():
    """The table names fields that exist."""
    kserve = open_inference_pb2.DESCRIPTOR.message_types_by_name.values()
    others = {each.name: each for outer in kserve for each in (outer, *outer.nested_types)}
    for message, fields in limits.FIELDS.items():
        other = others.get(message)
        known = schema.fields(message) if other is None else other.fields_by_name
        assert set(fields) <= set(known), message
    assert set(limits.MAX_BYTES) <= set(schema.messages())


def held(least):
    """Return how many objects refer to bytes of at least this length."""
    return sum(
        type(each) is bytes and len(each) >= least
        for holder in gc.get_objects()
        for each in gc.get_referents(holder)
    )


@pytest.mark.parametrize("method", ["SessionService/Session", "ImageService/PutImage"])
async def test_a_refused_message_of_a_stream_is_freed(method):
    """Nothing keeps its bytes once the call has ended, although the connection lasts."""
    size = 3 * MEGABYTE
    gc.collect()  # of what other tests left
    before = held(size)
    async with running() as server:
        kind = "stream_stream" if method.endswith("Session") else "stream_unary"
        start = getattr(server.channel, kind)(f"/legato.v1.{method}")
        for _ in range(3):
            call = start(iter([b"\x0a" + bytes(size)]))
            failed = await refusal(call.read() if method.endswith("Session") else call)
            assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        del call
        await until(lambda: held(size) <= before)


@pytest.mark.parametrize("place", ["before", "after"])
async def test_a_refusal_names_the_request(place):
    """The id that a request gives itself is known although the message is not parsed."""
    options = QUERY(options=inference_pb2.RequestOptions(request_id="mine")).SerializeToString()
    wrong = asking(top_p=2).SerializeToString()
    async with running() as server:
        call = server.channel.unary_unary("/legato.v1.InferenceService/Query")
        failed = await refusal(call(options + wrong if place == "before" else wrong + options))
        assert failed.details["RequestInfo"].request_id == "mine"
        strange = QUERY(options=inference_pb2.RequestOptions(request_id="a b")).SerializeToString()
        failed = await refusal(call(wrong + strange))
        assert failed.details["RequestInfo"].request_id not in ("", "a b")
