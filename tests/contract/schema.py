"""The contract as data: the committed descriptor set, with its comments."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import legato.v1
from google.protobuf import descriptor_pb2 as pb

PACKAGE = Path(next(iter(legato.v1.__path__)))

# Field numbers of descriptor.proto, which a source location's path is made of.
FILE_MESSAGE, FILE_ENUM, FILE_SERVICE = 4, 5, 6
MESSAGE_FIELD, MESSAGE_NESTED, MESSAGE_ENUM, MESSAGE_ONEOF = 2, 3, 4, 8
ENUM_VALUE, SERVICE_METHOD = 2, 2


class Element(NamedTuple):
    """A named element of the contract, with its comment."""

    kind: str
    name: str
    comment: str


@functools.cache
def descriptor_set() -> pb.FileDescriptorSet:
    """Load `descriptor.binpb`."""
    return pb.FileDescriptorSet.FromString((PACKAGE / "descriptor.binpb").read_bytes())


def files() -> list[pb.FileDescriptorProto]:
    """Return the contract's own files, without their imports."""
    return [file for file in descriptor_set().file if file.package == "legato.v1"]


def messages() -> dict[str, pb.DescriptorProto]:
    """Return every message by name; the contract nests none."""
    return {message.name: message for file in files() for message in file.message_type}


def services() -> dict[str, pb.ServiceDescriptorProto]:
    """Return every service by name."""
    return {service.name: service for file in files() for service in file.service}


def methods() -> list[pb.MethodDescriptorProto]:
    """Return every RPC."""
    return [method for service in services().values() for method in service.method]


def fields(message: str) -> list[str]:
    """Return the names of a message's fields, in the order of their numbers."""
    return [field.name for field in sorted(messages()[message].field, key=lambda f: f.number)]


def _is_synthetic(message: pb.DescriptorProto, index: int) -> bool:
    """Whether a oneof only represents `optional`."""
    return any(f.proto3_optional and f.oneof_index == index for f in message.field)


def _message(
    message: pb.DescriptorProto, path: tuple[int, ...], comment: dict[tuple[int, ...], str]
) -> Iterator[Element]:
    yield Element("message", message.name, comment.get(path, ""))
    for i, field in enumerate(message.field):
        at = (*path, MESSAGE_FIELD, i)
        yield Element("field", f"{message.name}.{field.name}", comment.get(at, ""))
    for i, oneof in enumerate(message.oneof_decl):
        if not _is_synthetic(message, i):
            at = (*path, MESSAGE_ONEOF, i)
            yield Element("oneof", f"{message.name}.{oneof.name}", comment.get(at, ""))


def elements() -> Iterator[Element]:
    """Yield every message, field, oneof, enum, value, service and RPC of the contract."""
    for file in files():
        locations = file.source_code_info.location
        comment = {tuple(place.path): place.leading_comments.strip() for place in locations}
        for i, message in enumerate(file.message_type):
            yield from _message(message, (FILE_MESSAGE, i), comment)
        for i, enum in enumerate(file.enum_type):
            at: tuple[int, ...] = (FILE_ENUM, i)
            yield Element("enum", enum.name, comment.get(at, ""))
            for j, value in enumerate(enum.value):
                yield Element("value", value.name, comment.get((*at, ENUM_VALUE, j), ""))
        for i, service in enumerate(file.service):
            at = (FILE_SERVICE, i)
            yield Element("service", service.name, comment.get(at, ""))
            for j, method in enumerate(service.method):
                name = f"{service.name}.{method.name}"
                yield Element("rpc", name, comment.get((*at, SERVICE_METHOD, j), ""))
