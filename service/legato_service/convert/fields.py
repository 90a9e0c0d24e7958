"""Fields that tasks of several skills have, checked; `path` is as in `requests`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from google.protobuf import duration_pb2, timestamp_pb2
from legato.v1 import geometry_pb2, inference_pb2, task_pb2
from legato_engine.core.geometry import Box, Point, SpatialRef
from legato_engine.core.task_specs import ObjectOrder
from legato_engine.errors import InvalidField, PromptTooLong

MAX_TEXT_BYTES = 1024 * 1024  # of a question, and of all messages of a conversation together

Listing: TypeAlias = (
    task_pb2.DetectTask
    | inference_pb2.DetectRequest
    | task_pb2.PointTask
    | inference_pb2.PointRequest
)

_ORDERS = {
    task_pb2.OBJECT_ORDER_UNSPECIFIED: ObjectOrder.MODEL,
    task_pb2.OBJECT_ORDER_MODEL: ObjectOrder.MODEL,
    task_pb2.OBJECT_ORDER_CONFIDENCE: ObjectOrder.CONFIDENCE,
}


def seconds(message: duration_pb2.Duration | timestamp_pb2.Timestamp) -> float:
    """A length of time, or a time since 1970."""
    return message.ToNanoseconds() / 1e9


def text(value: str, field: str, limit: int) -> str:
    if not value.strip():
        raise InvalidField("must not be empty", field=field)
    if len(value) > limit:
        raise PromptTooLong(
            f"{len(value)} characters, the limit is {limit}",
            field=field,
            limit=limit,
            actual=len(value),
        )
    return value


def check_text_size(texts: Sequence[str], field: str) -> None:
    """Bound the work of making tokens; how many of them fit is up to the model.

    Raises:
        PromptTooLong: the texts have more than `MAX_TEXT_BYTES` in UTF-8 together.
    """
    actual = sum(len(text.encode()) for text in texts)
    if actual > MAX_TEXT_BYTES:
        raise PromptTooLong(
            f"{actual} bytes of text, the limit is {MAX_TEXT_BYTES}",
            field=field,
            limit=MAX_TEXT_BYTES,
            actual=actual,
        )


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
        return Point(x=message.point.x, y=message.point.y)
    box = message.box
    if box.x_min > box.x_max or box.y_min > box.y_max:
        raise InvalidField("min is greater than max", field=f"{field}.box")
    return Box(x_min=box.x_min, y_min=box.y_min, x_max=box.x_max, y_max=box.y_max)
