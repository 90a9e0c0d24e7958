"""Messages to values of Python by the names of their fields, and times, enums and places."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import operator
import typing
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, NoneType, UnionType
from typing import Any, TypeVar

from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from legato.v1 import geometry_pb2, media_pb2

from legato_client._errors import InternalError
from legato_client._types import results
from legato_client._types.tasks import SpatialRef

ValueT = TypeVar("ValueT")
Getter = Callable[[Any], Any]


def read(kind: type[ValueT], message: Message, **given: Any) -> ValueT:
    """Build a dataclass from the message's fields of the same names, and from those `given`.

    An absent message, number or text is None where the dataclass allows it. Times are in seconds,
    moments in UTC, and the values of enums are their words.
    """
    make: Any = kind  # to mypy a type variable's class is not hashable
    value: ValueT = _reader(make, message.DESCRIPTOR, *given)(message, **given)
    return value


@functools.cache  # the dataclasses of this package
def _reader(kind: Any, message: Descriptor, *given: str) -> Callable[..., Any]:
    known, hints = message.fields_by_name, typing.get_type_hints(kind)
    names = [name for name in hints if name in known and name not in given]
    getters = [_getter(known[name], hints[name]) for name in names]
    if names != list(hints)[: len(names)]:
        return lambda message, **given: kind(
            **{name: get(message) for name, get in zip(names, getters, strict=True)}, **given
        )
    return lambda message, **given: kind(*[get(message) for get in getters], **given)


def _getter(field: FieldDescriptor, hint: Any) -> Getter:
    """Return how to get a field's value, of the type `hint`, from a message."""
    name, get = field.name, operator.attrgetter(field.name)
    kinds = typing.get_args(hint) if field.is_repeated or isinstance(hint, UnionType) else (hint,)
    value = get if (convert := _converter(field, kinds[0])) is None else _composed(convert, get)
    if field.is_repeated:
        return (lambda m: tuple(map(convert, get(m)))) if convert else _composed(tuple, get)
    return (lambda m: value(m) if m.HasField(name) else None) if NoneType in kinds else value


def _composed(convert: Getter, get: Getter) -> Getter:
    return lambda message: convert(get(message))


def _converter(field: FieldDescriptor, kind: Any) -> Getter | None:
    """Return what makes a value of that type of a field's; None: it is one."""
    if field.enum_type is not None:
        return functools.partial(enum_word, field.enum_type)
    if field.message_type is None:
        return None
    return _CONVERTERS.get(field.message_type.full_name) or _reader(kind, field.message_type)


@functools.lru_cache(256)  # every answer names one, always of the same few
def enum_word(enum: EnumDescriptor, number: int) -> str:
    """Return the value's name without its prefix; "unspecified" for one of a newer contract."""
    value = enum.values_by_number.get(number)
    if value is None:
        return "unspecified"
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return value.name.removeprefix(prefix).lower()


@functools.lru_cache(256)  # as above
def enum_number(enum: EnumDescriptor, name: str, word: str) -> Any:
    """Return the inverse of `enum_word`. Raises ValueError for another word."""
    words = {enum_word(enum, number): number for number in enum.values_by_number if number}
    if word not in words:
        raise ValueError(f"{name} must be one of {sorted(words)}, got {word!r}")
    return words[word]


def moment(message: timestamp_pb2.Timestamp) -> timestamp_pb2.Timestamp:
    """Return the timestamp, which then converts without an error.

    Raises:
        InternalError: it is out of the bounds of timestamps.
    """
    try:
        message.ToNanoseconds()
    except ValueError as error:
        raise InternalError(f"the server's answer is malformed: {error}") from None
    return message


def utc(message: timestamp_pb2.Timestamp) -> datetime.datetime:
    return moment(message).ToDatetime(datetime.UTC)


def stamp(message: media_pb2.FrameStamp) -> results.FrameStamp:
    capture_time = message.capture_time if message.HasField("capture_time") else None
    return results.FrameStamp(
        frame_id=message.frame_id,
        capture_time_ns=moment(capture_time).ToNanoseconds() if capture_time else None,
        sequence=message.sequence,
    )


def seconds(duration: duration_pb2.Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


_CONVERTERS: dict[str, Getter] = {
    "google.protobuf.Duration": seconds,
    "google.protobuf.Timestamp": utc,
    "legato.v1.FrameStamp": stamp,
    "legato.v1.Size": operator.attrgetter("width", "height"),
}
"""Converters of messages that are no dataclass of the same fields."""

MAX_SECONDS = 315_576_000_000
"""Maximum of protobuf's Duration: 10,000 years."""


def duration(seconds: float | None) -> duration_pb2.Duration | None:
    """Convert to a duration. Raises ValueError for a time outside of 0 to `MAX_SECONDS`."""
    if seconds is None:
        return None
    if not 0 <= seconds <= MAX_SECONDS:
        raise ValueError(f"a time must be 0 to {MAX_SECONDS} seconds, got {seconds}")
    message = duration_pb2.Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def to_refs(refs: Iterable[SpatialRef]) -> list[geometry_pb2.SpatialRef]:
    return [
        geometry_pb2.SpatialRef(point=geometry_pb2.Point(**dataclasses.asdict(ref)))
        if isinstance(ref, results.Point)
        else geometry_pb2.SpatialRef(box=geometry_pb2.Box(**dataclasses.asdict(ref)))
        for ref in refs
    ]


def fill(message: Any, value: Any, converters: Mapping[str, Getter] = MappingProxyType({})) -> None:
    """Set a message's fields to those of the same names of a dataclass, converted by name.

    None, and what a field without presence has anyway, leave the message as it is.
    """
    for name, is_always_set, put in _setters(message.DESCRIPTOR, value.__class__):
        given = getattr(value, name)
        if given is not None and name in converters:
            given = converters[name](given)
        if given or (given is not None and is_always_set):
            put(message, given)


@functools.cache  # the dataclasses of this package
def _setters(
    message: Descriptor, kind: Any
) -> tuple[tuple[str, bool, Callable[[Any, Any], None]], ...]:
    fields = message.fields_by_name
    return tuple(
        (name, fields[name].has_presence, _setter(fields[name]))
        for name in kind.__dataclass_fields__
        if name in fields
    )


def _setter(field: FieldDescriptor) -> Callable[[Any, Any], None]:
    name = field.name
    if field.is_repeated:
        return lambda message, value: getattr(message, name).extend(value)
    if field.message_type is not None:
        return lambda message, value: getattr(message, name).CopyFrom(value)
    return lambda message, value: setattr(message, name, value)
