"""Skills: protobuf tasks to engine tasks and results back."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.message import Message
from legato.v1 import geometry_pb2, inference_pb2, task_pb2
from legato_engine.errors import InvalidField, PromptTooLong
from legato_engine.types import (
    AnswerFormat,
    CaptionLength,
    CaptionOutput,
    CaptionSpec,
    DetectOutput,
    DetectSpec,
    GroundedText,
    ImageBox,
    ImagePlace,
    ImagePoint,
    MaskOutline,
    ObjectEvent,
    ObjectOrder,
    PointEvent,
    PointOutput,
    PointSpec,
    QueryOutput,
    QuerySpec,
    SegmentOutput,
    SegmentSpec,
    SpatialRef,
    TaskOutput,
    TaskSpec,
    Turn,
)

Listing: TypeAlias = (
    task_pb2.DetectTask
    | inference_pb2.DetectRequest
    | task_pb2.PointTask
    | inference_pb2.PointRequest
)

_ORDERS = {task_pb2.ObjectOrder.Value(f"OBJECT_ORDER_{each.name}"): each for each in ObjectOrder}
_ORDERS[task_pb2.OBJECT_ORDER_UNSPECIFIED] = ObjectOrder.MODEL


def seconds(message: duration_pb2.Duration | timestamp_pb2.Timestamp) -> float:
    """Return a duration, or a time since 1970, in seconds."""
    return message.ToNanoseconds() / 1e9


def text(value: str, field: str) -> str:
    if not value.strip():
        raise InvalidField("must not be empty", field=field)
    return value


def max_objects(message: Listing) -> int | None:
    return message.max_objects if message.HasField("max_objects") else None


def order(message: Listing, path: str) -> ObjectOrder:
    if message.order not in _ORDERS:
        raise InvalidField(f"{message.order} is not an order of objects", field=f"{path}order")
    return _ORDERS[message.order]


def refs(messages: Sequence[geometry_pb2.SpatialRef], path: str) -> tuple[SpatialRef, ...]:
    return tuple(
        _ref(message, f"{path}spatial_refs[{index}]") for index, message in enumerate(messages)
    )


def _ref(message: geometry_pb2.SpatialRef, field: str) -> SpatialRef:
    kind = message.WhichOneof("ref")
    if kind is None:
        raise InvalidField("a spatial reference is a point or a box", field=field)
    if kind == "point":
        return ImagePoint(x=message.point.x, y=message.point.y)
    box = message.box
    if box.x_min > box.x_max or box.y_min > box.y_max:
        raise InvalidField("min is greater than max", field=f"{field}.box")
    return ImageBox(x_min=box.x_min, y_min=box.y_min, x_max=box.x_max, y_max=box.y_max)


# ---------------------------------------------------------------- chat

MAX_TEXT_BYTES = 1024 * 1024
"""Bytes of a conversation's messages together, which bound the work of making tokens; how many
tokens fit is up to the model."""

_SYSTEM, _USER, _ASSISTANT = (
    task_pb2.CHAT_ROLE_SYSTEM,
    task_pb2.CHAT_ROLE_USER,
    task_pb2.CHAT_ROLE_ASSISTANT,
)


class ChatQuestion(NamedTuple):
    """A question and the messages before it; `places` are those of image parts."""

    system: str
    history: tuple[Turn, ...]
    question: str
    places: tuple[ImagePlace, ...]


def conversation(messages: Sequence[task_pb2.ChatMessage], field: str) -> ChatQuestion:
    """Convert messages: system's, if any, then user and assistant in turns, user last.

    Messages of one role in a row are one turn.

    Raises:
        InvalidField: the messages are malformed.
        PromptTooLong: the messages have too much text together.
    """
    is_system = [message.role == _SYSTEM for message in messages]
    num_system = (*is_system, False).index(False)
    _check_roles(messages, num_system, field)
    texts = [_text(message, f"{field}[{index}]") for index, message in enumerate(messages)]
    actual = sum(len(text.encode()) for text in texts)
    if actual > MAX_TEXT_BYTES:
        raise PromptTooLong(
            f"{actual} bytes of text, the limit is {MAX_TEXT_BYTES}",
            field=field,
            limit=MAX_TEXT_BYTES,
            actual=actual,
        )
    spoken = itertools.groupby(range(num_system, len(messages)), lambda at: messages[at].role)
    groups = [list(group) for _, group in spoken]
    turns = [_joined([texts[at] for at in group]) for group in groups]
    return ChatQuestion(
        system=_joined(texts[:num_system]),
        history=tuple(
            Turn(question=question, answer=answer)
            for question, answer in zip(turns[:-1:2], turns[1::2], strict=True)
        ),
        question=turns[-1],
        places=tuple(
            place
            for turn, group in enumerate(groups[::2])
            for place in _image_places(turn, group, messages, texts, field)
        ),
    )


def _check_roles(messages: Sequence[task_pb2.ChatMessage], num_system: int, field: str) -> None:
    for index, message in enumerate(messages[num_system:], num_system):
        expected = (_USER,) if index == num_system else (_USER, _ASSISTANT)
        if message.role not in expected:
            names = " or ".join(map(task_pb2.ChatRole.Name, expected))
            raise InvalidField(
                f"{names} expected: messages of the system come first, then one of the user",
                field=f"{field}[{index}].role",
            )
    if len(messages) == num_system or messages[-1].role != _USER:
        raise InvalidField("the last message must be the user's", field=field)


def _joined(texts: Sequence[str]) -> str:
    """Join the texts of a turn by blank lines, without empty ones."""
    return texts[0] if len(texts) == 1 else "\n\n".join(filter(str.strip, texts))


def _image_places(
    turn: int,
    group: Sequence[int],
    messages: Sequence[task_pb2.ChatMessage],
    texts: Sequence[str],
    field: str,
) -> Iterator[ImagePlace]:
    """Yield the place of each image part of a turn, whose messages are `group`."""
    length = 0  # of the turn's text before the message
    for at in group:
        is_kept = len(group) == 1 or bool(texts[at].strip())  # in the turn's text, by `_joined`
        offset = length + len("\n\n") * (length > 0 and is_kept)
        for index, part in enumerate(messages[at].parts):
            if part.HasField("image"):
                shown = f"{field}[{at}].parts[{index}].image"
                yield ImagePlace(turn=turn, offset=offset, field=shown)
            offset += len(part.text) * is_kept
        length = offset


def _text(message: task_pb2.ChatMessage, field: str) -> str:
    for index, part in enumerate(message.parts):
        kind = part.WhichOneof("part")
        if kind is None:
            raise InvalidField("a part needs a text or an image", field=f"{field}.parts[{index}]")
        if kind == "image" and message.role != _USER:
            raise InvalidField("only the user shows images", field=f"{field}.parts[{index}].image")
    text = "".join(part.text for part in message.parts)
    shows_image = any(part.HasField("image") for part in message.parts)
    if message.role == _USER and not text.strip() and not shows_image:
        raise InvalidField("a user's message needs text or the image", field=f"{field}.parts")
    return text


# ---------------------------------------------------------------- pieces


def grounding(value: GroundedText) -> task_pb2.Grounding:
    return task_pb2.Grounding(
        start_index=value.start_index,
        end_index=value.end_index,
        points=[geometry_pb2.Point(x=each.x, y=each.y) for each in value.points],
    )


def fill_object(message: geometry_pb2.DetectedObject, value: ObjectEvent) -> None:
    message.label = value.label
    box, found = message.box, value.box
    box.x_min, box.y_min, box.x_max, box.y_max = found.x_min, found.y_min, found.x_max, found.y_max
    if value.confidence is not None:
        message.confidence = value.confidence


def fill_pointed(message: geometry_pb2.PointedObject, value: PointEvent) -> None:
    message.label = value.label
    message.point.x, message.point.y = value.point.x, value.point.y
    if value.confidence is not None:
        message.confidence = value.confidence


def outline(value: MaskOutline) -> geometry_pb2.Outline:
    return geometry_pb2.Outline(
        path=value.path,
        box=box(value.box),
        label=value.label,
        confidence=value.confidence,
        coarse=value.coarse,
    )


def box(value: ImageBox) -> geometry_pb2.Box:
    return geometry_pb2.Box(
        x_min=value.x_min, y_min=value.y_min, x_max=value.x_max, y_max=value.y_max
    )


# ---------------------------------------------------------------- skills

_LENGTHS = {
    task_pb2.CaptionLength.Value(f"CAPTION_LENGTH_{each.name}"): each for each in CaptionLength
}
_LENGTHS[task_pb2.CAPTION_LENGTH_UNSPECIFIED] = CaptionLength.NORMAL


@dataclasses.dataclass(frozen=True, slots=True)
class SkillConversions:
    """Conversions of one skill, named as in `core`.

    `task` takes the task's message or the request of the skill's own call, and the path of its
    fields; `fill` fills the result's message or the response of that call. Both have the fields
    that this module reads and writes.
    """

    name: str
    task: Callable[[Any, str], TaskSpec]
    result: type[TaskOutput]
    response: Callable[[], Any]
    fill: Callable[[Any, Any], None]

    def answer(self, result: TaskOutput) -> Any:
        """Build the skill's response, without its info."""
        response = self.response()
        self.fill(response, result)
        return response


# ---------------------------------------------------------------- query

Query: TypeAlias = task_pb2.QueryTask | inference_pb2.QueryRequest


def _query(message: Query, path: str) -> QuerySpec:
    refs_given = refs(message.spatial_refs, path)
    if not message.messages:
        return QuerySpec(
            question=text(message.question, f"{path}question"),
            reasoning=message.reasoning,
            spatial_refs=refs_given,
            places=_placed(message, None, path),
            response_format=_response_format(message, path),
        )
    if message.question:
        raise InvalidField("a question or messages, not both", field=f"{path}question")
    talk = conversation(message.messages, f"{path}messages")
    return QuerySpec(
        question=talk.question,
        reasoning=message.reasoning,
        spatial_refs=refs_given,
        system=talk.system,
        history=talk.history,
        shows_image=bool(talk.places),
        places=_placed(message, talk.places, path),
        response_format=_response_format(message, path),
    )


def _placed(
    message: Query, shown: Sequence[ImagePlace] | None, path: str
) -> tuple[ImagePlace, ...]:
    """Return the places of the images with their times; none for images before all text.

    `shown` are the places of image parts: all images have one, or none.
    """
    if not (shown or message.images):
        return ()
    count = max(len(message.images), 1)
    if shown and len(shown) != count:
        given = f"{len(shown)} image parts and {count} {'images' if count > 1 else 'image'}"
        field = shown[count].field if len(shown) > count else f"{path}messages"
        raise InvalidField(f"{given}: show all or none", field=field)
    times = [_time(each, f"{path}images[{index}]") for index, each in enumerate(message.images)]
    for index, (before, time) in enumerate(itertools.pairwise(times), 1):
        if before is not None and time is not None and time <= before:
            raise InvalidField(
                f"{time:g} s after {before:g} s: a clip's frames follow each other",
                field=f"{path}images[{index}].time",
            )
    placed = shown or [ImagePlace()] * len(times)
    if times:
        placed = [
            msgspec.structs.replace(place, time=time)
            for place, time in zip(placed, times, strict=True)
        ]
    return () if all(place.is_first for place in placed) else tuple(placed)


def _time(image: task_pb2.QueryImage, field: str) -> float | None:
    if image.image.WhichOneof("source") is None:
        raise InvalidField("an image is required", field=f"{field}.image")
    return seconds(image.time) if image.HasField("time") else None


def _response_format(message: Query, path: str) -> AnswerFormat | None:
    if not message.HasField("response_format"):
        return None
    asked = message.response_format
    if asked.WhichOneof("format") is None:
        raise InvalidField("no format is set", field=f"{path}response_format")
    return AnswerFormat(
        json_schema=asked.json_schema,
        regex=asked.regex,
        choices=tuple(asked.choices.texts),
        grammar=asked.grammar,
    )


def _fill_query(
    message: task_pb2.QueryResult | inference_pb2.QueryResponse, result: QueryOutput
) -> None:
    message.answer = result.answer
    if result.reasoning is not None:
        message.reasoning.text = result.reasoning
        message.reasoning.grounding.extend(map(grounding, result.grounding))


QUERY = SkillConversions("query", _query, QueryOutput, inference_pb2.QueryResponse, _fill_query)


# ---------------------------------------------------------------- caption

Caption: TypeAlias = task_pb2.CaptionTask | inference_pb2.CaptionRequest


def _caption(message: Caption, path: str) -> CaptionSpec:
    if message.length not in _LENGTHS:
        raise InvalidField(f"{message.length} is not a caption length", field=f"{path}length")
    return CaptionSpec(length=_LENGTHS[message.length])


def _fill_caption(
    message: task_pb2.CaptionResult | inference_pb2.CaptionResponse, result: CaptionOutput
) -> None:
    message.caption = result.caption


CAPTION = SkillConversions(
    "caption", _caption, CaptionOutput, inference_pb2.CaptionResponse, _fill_caption
)


# ---------------------------------------------------------------- detect

Detect: TypeAlias = task_pb2.DetectTask | inference_pb2.DetectRequest


def _detect(message: Detect, path: str) -> DetectSpec:
    return DetectSpec(
        object=text(message.object, f"{path}object"),
        max_objects=max_objects(message),
        min_confidence=message.min_confidence,
        order=order(message, path),
    )


def _fill_detect(
    message: task_pb2.DetectResult | inference_pb2.DetectResponse, result: DetectOutput
) -> None:
    objects = message.objects
    for value in result.objects:
        fill_object(objects.add(), value)


DETECT = SkillConversions(
    "detect", _detect, DetectOutput, inference_pb2.DetectResponse, _fill_detect
)


# ---------------------------------------------------------------- point

PointMessage: TypeAlias = task_pb2.PointTask | inference_pb2.PointRequest


def _point(message: PointMessage, path: str) -> PointSpec:
    return PointSpec(
        object=text(message.object, f"{path}object"),
        max_objects=max_objects(message),
        spatial_refs=refs(message.spatial_refs, path),
        min_confidence=message.min_confidence,
        order=order(message, path),
    )


def _fill_point(
    message: task_pb2.PointResult | inference_pb2.PointResponse, result: PointOutput
) -> None:
    points = message.points
    for value in result.points:
        fill_pointed(points.add(), value)


POINT = SkillConversions("point", _point, PointOutput, inference_pb2.PointResponse, _fill_point)


# ---------------------------------------------------------------- segment

Segment: TypeAlias = task_pb2.SegmentTask | inference_pb2.SegmentRequest


def _segment(message: Segment, path: str) -> SegmentSpec:
    return SegmentSpec(
        object=text(message.object, f"{path}object"),
        spatial_refs=refs(message.spatial_refs, path),
    )


def _fill_segment(
    message: task_pb2.SegmentResult | inference_pb2.SegmentResponse, result: SegmentOutput
) -> None:
    message.segments.extend(map(outline, result.segments))


SEGMENT = SkillConversions(
    "segment", _segment, SegmentOutput, inference_pb2.SegmentResponse, _fill_segment
)


# ---------------------------------------------------------------- table

SKILLS: tuple[SkillConversions, ...] = (QUERY, CAPTION, DETECT, POINT, SEGMENT)
BY_NAME: Mapping[str, SkillConversions] = {skill.name: skill for skill in SKILLS}
"""Skills by the field of the contract's Task and TaskResult."""
BY_REQUEST: Mapping[type[Message], SkillConversions] = {
    inference_pb2.QueryRequest: QUERY,
    inference_pb2.CaptionRequest: CAPTION,
    inference_pb2.DetectRequest: DETECT,
    inference_pb2.PointRequest: POINT,
    inference_pb2.SegmentRequest: SEGMENT,
}
"""Skills by the request of their own call."""
BY_RESULT: Mapping[type, SkillConversions] = {skill.result: skill for skill in SKILLS}
