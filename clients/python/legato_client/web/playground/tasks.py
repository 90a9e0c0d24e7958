"""Tasks as the page sends them, in the contract's own JSON, to the client's values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf import json_format
from legato.v1 import geometry_pb2, inference_pb2, task_pb2

from legato_client._errors import FieldViolation, InvalidArgument
from legato_client._images.sources import CachedImage
from legato_client._proto import pieces, skills
from legato_client._types import tasks
from legato_client._types.results import Box, Point
from legato_client.batch.tasks import listed

NumberT = TypeVar("NumberT", int, float)
WordT = TypeVar("WordT")


def invalid(field: str, description: str) -> InvalidArgument:
    """Raise InvalidArgument for input that cannot be forwarded."""
    return InvalidArgument(
        f"{field}: {description}",
        reason="INVALID_FIELD",
        metadata={"field": field},
        field_violations=(FieldViolation(field, description),),
    )


def read_task(value: Mapping[str, Any], files: Sequence[str] = ()) -> tasks.Task:
    """Parse the JSON form of `legato.v1.Task`. Raises InvalidArgument.

    Its messages show the images that the server holds under the task's ids, or else `files`.
    """
    message = _parsed("task", value, task_pb2.Task())
    kind = message.WhichOneof("kind")
    if kind is None:
        raise invalid("task", f"names no skill: {listed(tuple(skills.BY_NAME))}")
    skill, own = skills.BY_NAME[kind], getattr(message, kind)
    read = {name: reader for name, reader in _FIELDS.items() if skill.takes(name)}
    given = {name: reader(own, f"task.{kind}.{name}") for name, reader in read.items()}
    if kind == "query":
        held = [CachedImage(each.image.image_id) for each in own.images]
        given["messages"] = _messages(own, held or map(Path, files))
    given |= {"sampling": _sampling(message.sampling), "task_id": message.task_id}
    task: tasks.Task = pieces.read(skill.task, own, **given)
    return task


def read_options(value: Mapping[str, Any]) -> tasks.Options:
    """Parse the page's fields of `legato.v1.RequestOptions`. Raises InvalidArgument."""
    return pieces.read(tasks.Options, _parsed("options", value, inference_pb2.RequestOptions()))


def _parsed(field: str, value: Mapping[str, Any], message: Any) -> Any:
    try:
        return json_format.ParseDict(dict(value), message, max_recursion_depth=16)
    except json_format.ParseError as error:
        raise invalid(field, str(error)) from None


def _sampling(message: task_pb2.Sampling) -> tasks.Sampling:
    given: dict[str, Any] = {
        field.name: _number(value) for field, value in message.ListFields() if field.name != "stop"
    }
    return tasks.Sampling(**given, stop=tuple(message.stop))


def _place(ref: geometry_pb2.SpatialRef) -> tasks.SpatialRef:
    match ref.WhichOneof("ref"):
        case "point":
            return Point(_number(ref.point.x), _number(ref.point.y))
        case "box":
            box = ref.box
            return Box(*map(_number, (box.x_min, box.y_min, box.x_max, box.y_max)))
        case _:
            raise invalid("task.spatial_refs", "a place is a point or a box")


def _number(value: NumberT) -> NumberT:
    """Format a number as typed: contract floats have seven digits."""
    return round(value, 6)


def _messages(
    query: task_pb2.QueryTask, images: Iterable[CachedImage | Path]
) -> tuple[tasks.Message, ...]:
    """Return the messages with the images that they show; without any, they are words."""
    left = iter(images)
    messages = tuple(_message(message, left) for message in query.messages)
    if next(left, None) is not None:
        raise invalid("task.query.images", "has more images than the messages show")
    return messages


def _message(message: task_pb2.ChatMessage, images: Iterator[CachedImage | Path]) -> tasks.Message:
    role: Any = _word(message, "role", "task.query.messages.role")
    parts: list[str | CachedImage | Path] = []
    for part in message.parts:
        if part.WhichOneof("part") != "image":
            parts.append(part.text)
        elif (image := next(images, None)) is not None:
            parts.append(image)
        else:
            raise invalid("task.query.images", "has fewer images than the messages show")
    if all(isinstance(part, str) for part in parts):
        return tasks.Message(role, "".join(map(str, parts)))
    return tasks.Message(role, tuple(parts))


def _format(message: task_pb2.ResponseFormat) -> tasks.ResponseFormat:
    kind = message.WhichOneof("format")
    if kind is None:
        raise invalid("task.query.response_format", "sets no format")
    return tasks.ResponseFormat(
        json_schema=message.json_schema if kind == "json_schema" else None,
        regex=message.regex,
        choices=tuple(message.choices.texts),
        grammar=message.grammar,
    )


def _word(message: Any, name: str, field: str, default: str = "") -> str:
    """Return the word of an enum's value; `default` stands for none."""
    number = getattr(message, name)
    word = pieces.enum_word(message.DESCRIPTOR.fields_by_name[name].enum_type, number)
    if number == 0 and default:
        return default
    if word == "unspecified":
        raise invalid(field, "has no such value")
    return word


_FIELDS: Mapping[str, Callable[[Any, str], Any]] = {
    "length": lambda own, field: _word(own, "length", field, "normal"),
    "order": lambda own, field: _word(own, "order", field, "model"),
    "min_confidence": lambda own, _: (
        _number(own.min_confidence) if own.HasField("min_confidence") else None
    ),
    "spatial_refs": lambda own, _: tuple(map(_place, own.spatial_refs)),
    "response_format": lambda own, _: (
        _format(own.response_format) if own.HasField("response_format") else None
    ),
}
"""Parsers of the fields whose values are not the contract's, whichever skill has them."""
