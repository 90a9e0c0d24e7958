"""Random messages of any type, and seeded damage to bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, TypeVar

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from legato.kserve import open_inference_pb2
from legato.v1 import admin_pb2, image_pb2, inference_pb2, server_pb2, session_pb2

MessageT = TypeVar("MessageT", bound=Message)

_MODULES: tuple[Any, ...] = (
    admin_pb2,
    image_pb2,
    inference_pb2,
    server_pb2,
    session_pb2,
    open_inference_pb2,
    health_pb2,
    reflection_pb2,
)
_D = FieldDescriptor
_INTEGERS = {
    _D.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    _D.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    _D.CPPTYPE_UINT32: (0, 2**32 - 1),
    _D.CPPTYPE_UINT64: (0, 2**64 - 1),
    _D.CPPTYPE_ENUM: (-1, 2**31 - 1),
}
_FLOATS = (0.0, 0.5, 1.0, -1.0, 1.5, 1e38, float("inf"), float("nan"))
_TEXTS = ("", "x", "cat", "image/jpeg", "é" * 70, "x" * 300, "x" * 1100, "\x1b[31m", "0")
_DEPTH = 8


def methods() -> Iterator[tuple[str, MethodDescriptor]]:
    """Every method of the services that a server has, by its path."""
    for module in _MODULES:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}", method


def request_of(method: MethodDescriptor, chance: random.Random) -> Message:
    """A random request of a method."""
    return filled(message_factory.GetMessageClass(method.input_type)(), chance)


def filled(message: MessageT, chance: random.Random, depth: int = 0) -> MessageT:
    """Fill about half of the fields, with edges of their types; the same for the same `chance`."""
    for field in message.DESCRIPTOR.fields:
        if _is_map(field) or chance.random() < 0.5 or depth > _DEPTH:
            continue
        if field.is_repeated:
            values = getattr(message, field.name)
            for _ in range(chance.choice((1, 1, 2, 2, 3, 9, 40))):
                if field.message_type is None:
                    values.append(_value(field, chance))
                else:
                    filled(values.add(), chance, depth + 1)
        elif field.message_type is not None:
            inner = getattr(message, field.name)
            inner.SetInParent()
            filled(inner, chance, depth + 1)
        else:
            setattr(message, field.name, _value(field, chance))
    return message


def disturbed(message: MessageT, chance: random.Random) -> MessageT:
    """Return the message with one field, at any depth, that has another value."""
    copy = type(message)()
    copy.CopyFrom(message)
    inner: Message = copy
    while inner.DESCRIPTOR.fields:
        fields: list[Any] = [each for each, _ in inner.ListFields() if not _is_map(each)]
        if not fields or chance.random() < 0.3:
            fields = [each for each in inner.DESCRIPTOR.fields if not _is_map(each)]
        field = chance.choice(fields)
        if field.message_type is None:
            inner.ClearField(field.name)
            if not field.is_repeated:
                setattr(inner, field.name, _value(field, chance))
            else:
                getattr(inner, field.name).extend(
                    _value(field, chance) for _ in range(chance.choice((1, 9, 70)))
                )
            break
        if field.is_repeated:
            entries = getattr(inner, field.name)
            inner = chance.choice(entries) if entries and chance.random() < 0.7 else entries.add()
        else:
            inner = getattr(inner, field.name)
            inner.SetInParent()
    return copy


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _value(field: Any, chance: random.Random) -> Any:
    if field.type == _D.TYPE_STRING:
        return chance.choice(_TEXTS)
    if field.type == _D.TYPE_BYTES:
        return chance.randbytes(chance.choice((0, 1, 32, 33, 300)))
    if field.cpp_type == _D.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if field.cpp_type in (_D.CPPTYPE_FLOAT, _D.CPPTYPE_DOUBLE):
        return chance.choice(_FLOATS)
    least, greatest = _INTEGERS[field.cpp_type]
    return chance.choice((0, 1, 2, 5, 64, least, greatest, chance.randint(least, greatest)))


# ---------------------------------------------------------------- mutation

_EDGES = (0, 1, 0x7F, 0x80, 0xFE, 0xFF)


def mutate(data: bytes, chance: random.Random) -> bytes:
    """Return `data` with one to eight faults; the same for the same state of `chance`."""
    mutant = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        if not mutant:
            break
        at = chance.randrange(len(mutant))
        length = min(chance.choice((1, 2, 4, 16, 64)), len(mutant) - at)
        match chance.randrange(7):
            case 0:
                mutant[at] ^= 1 << chance.randrange(8)
            case 1:
                mutant[at] = chance.choice(_EDGES)
            case 2:
                mutant[at : at + length] = chance.randbytes(length)
            case 3:
                del mutant[at : at + length]
            case 4:
                mutant[at:at] = mutant[at : at + length] * chance.randint(1, 20)
            case 5:
                other = chance.randrange(len(mutant))
                mutant[at : at + length] = mutant[other : other + length]
            case 6:
                del mutant[chance.randrange(len(mutant)) :]
    return bytes(mutant)
