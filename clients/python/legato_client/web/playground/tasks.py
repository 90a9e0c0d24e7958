"""Tasks as the page sends them, in the contract's own JSON, to the client's values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from google.protobuf import json_format
from legato.v1 import geometry_pb2, inference_pb2, task_pb2

from legato_client._errors import FieldViolation, InvalidArgument
from legato_client._values.results import Box, Point
from legato_client._values.tasks import (
    CaptionLength,
    CaptionTask,
    DetectTask,
    Message,
    ObjectOrder,
    Options,
    PointTask,
    QueryTask,
    Role,
    Sampling,
    SegmentTask,
    SpatialRef,
    Task,
    Tracking,
)

NumberT = TypeVar("NumberT", int, float)
WordT = TypeVar("WordT")

_LENGTHS: dict[int, CaptionLength] = {
    task_pb2.CAPTION_LENGTH_UNSPECIFIED: "normal",
    task_pb2.CAPTION_LENGTH_SHORT: "short",
    task_pb2.CAPTION_LENGTH_NORMAL: "normal",
    task_pb2.CAPTION_LENGTH_LONG: "long",
}
_ORDERS: dict[int, ObjectOrder] = {
    task_pb2.OBJECT_ORDER_UNSPECIFIED: "model",
    task_pb2.OBJECT_ORDER_MODEL: "model",
    task_pb2.OBJECT_ORDER_CONFIDENCE: "confidence",
}
_ROLES: dict[int, Role] = {
    task_pb2.CHAT_ROLE_SYSTEM: "system",
    task_pb2.CHAT_ROLE_USER: "user",
    task_pb2.CHAT_ROLE_ASSISTANT: "assistant",
}


def invalid(field: str, description: str) -> InvalidArgument:
    """What the page sent cannot be passed on."""
    return InvalidArgument(
        f"{field}: {description}",
        reason="INVALID_FIELD",
        metadata={"field": field},
        field_violations=(FieldViolation(field, description),),
    )


def read_task(value: object) -> Task:
    """The JSON form of `legato.v1.Task`; raises InvalidArgument."""
    if not isinstance(value, dict):
        raise invalid("task", "must be an object")
    return task_of(_parsed("task", value, task_pb2.Task()))


def read_options(value: object) -> Options:
    """The fields of `legato.v1.RequestOptions` that the page sets; raises InvalidArgument."""
    if not isinstance(value, dict):
        raise invalid("options", "must be an object")
    message = _parsed("options", value, inference_pb2.RequestOptions())
    return Options(
        request_id=message.request_id,
        model=message.model,
        adapter=message.adapter,
        top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
    )


def task_of(message: task_pb2.Task) -> Task:
    """Raises InvalidArgument for a task without a skill, or with an unknown word."""
    sampling, task_id = _sampling(message.sampling), message.task_id
    match message.WhichOneof("kind"):
        case "query":
            query = message.query
            return QueryTask(
                question=query.question,
                reasoning=query.reasoning,
                spatial_refs=_places(query.spatial_refs),
                sampling=sampling,
                task_id=task_id,
                messages=tuple(map(_message, query.messages)),
            )
        case "caption":
            length = _known(_LENGTHS, message.caption.length, "task.caption.length")
            return CaptionTask(length, sampling, task_id)
        case "detect":
            detect = message.detect
            return DetectTask(
                detect.object,
                detect.max_objects if detect.HasField("max_objects") else None,
                sampling,
                task_id,
                _min_confidence(detect),
                _known(_ORDERS, detect.order, "task.detect.order"),
                _tracking(detect.tracking) if detect.HasField("tracking") else None,
            )
        case "point":
            point = message.point
            return PointTask(
                point.object,
                point.max_objects if point.HasField("max_objects") else None,
                _places(point.spatial_refs),
                sampling,
                task_id,
                _min_confidence(point),
                _known(_ORDERS, point.order, "task.point.order"),
            )
        case "segment":
            segment = message.segment
            return SegmentTask(segment.object, _places(segment.spatial_refs), sampling, task_id)
        case _:
            raise invalid("task", "names no skill: query, caption, detect, point or segment")


def _min_confidence(message: task_pb2.DetectTask | task_pb2.PointTask) -> float | None:
    return _number(message.min_confidence) if message.HasField("min_confidence") else None


def _tracking(message: task_pb2.Tracking) -> Tracking:
    if not message.HasField("max_unseen"):
        return Tracking()
    return Tracking(message.max_unseen.ToNanoseconds() / 1e9)


def _parsed(field: str, value: Mapping[str, Any], message: Any) -> Any:
    try:
        return json_format.ParseDict(dict(value), message, max_recursion_depth=16)
    except json_format.ParseError as error:
        raise invalid(field, str(error)) from None


def _sampling(message: task_pb2.Sampling) -> Sampling:
    given: dict[str, Any] = {
        field.name: _number(value) for field, value in message.ListFields() if field.name != "stop"
    }
    return Sampling(**given, stop=tuple(message.stop))


def _places(refs: Iterable[geometry_pb2.SpatialRef]) -> tuple[SpatialRef, ...]:
    return tuple(map(_place, refs))


def _place(ref: geometry_pb2.SpatialRef) -> SpatialRef:
    match ref.WhichOneof("ref"):
        case "point":
            return Point(_number(ref.point.x), _number(ref.point.y))
        case "box":
            box = ref.box
            return Box(*map(_number, (box.x_min, box.y_min, box.x_max, box.y_max)))
        case _:
            raise invalid("task.spatial_refs", "a place is a point or a box")


def _number(value: NumberT) -> NumberT:
    """As it was typed: a float of the contract has seven digits."""
    return round(value, 6)


def _message(message: task_pb2.ChatMessage) -> Message:
    """Its words: the request's picture stands in front of the user's first without being named."""
    role = _known(_ROLES, message.role, "task.query.messages.role")
    return Message(role, "".join(part.text for part in message.parts))


def _known(words: Mapping[int, WordT], number: int, field: str) -> WordT:
    if number not in words:
        raise invalid(field, "has no such value")
    return words[number]
