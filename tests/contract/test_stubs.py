"""The committed stubs can be imported, are typed, and match the contract."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from tests.contract import schema

SOURCES = Path(__file__).resolve().parents[2] / "proto" / "legato" / "v1"
NOUNS = sorted(path.stem for path in SOURCES.glob("*.proto"))
SERVICES = {noun for noun in NOUNS if "\nservice " in (SOURCES / f"{noun}.proto").read_text()}


def test_nouns() -> None:
    """The contract has one file for each of these nouns."""
    nouns = "admin error geometry image inference limit media server session task"
    assert nouns.split() == NOUNS


@pytest.mark.parametrize("noun", NOUNS)
def test_stub_imports(noun: str) -> None:
    """Every file of the contract has stubs under the path that protoc assumes."""
    module = importlib.import_module(f"legato.v1.{noun}_pb2")
    if noun in SERVICES:
        importlib.import_module(f"legato.v1.{noun}_pb2_grpc")
    assert module.DESCRIPTOR.name == f"legato/v1/{noun}.proto"


@pytest.mark.parametrize("noun", NOUNS)
def test_stub_is_typed(noun: str) -> None:
    """Every stub has a type stub, gRPC's those with a service; the package is marked as typed."""
    assert (schema.PACKAGE / f"{noun}_pb2.pyi").is_file()
    assert (schema.PACKAGE / f"{noun}_pb2_grpc.pyi").is_file() == (noun in SERVICES)
    assert (schema.PACKAGE.parent / "py.typed").is_file()


@pytest.mark.parametrize("noun", NOUNS)
def test_descriptor_set_is_that_of_the_stubs(noun: str) -> None:
    """`descriptor.binpb` without comments equals what the stubs register."""
    name = f"legato/v1/{noun}.proto"
    importlib.import_module(f"legato.v1.{noun}_pb2")
    (shipped,) = [file for file in schema.files() if file.name == name]
    registered = type(shipped)()
    descriptor_pool.Default().FindFileByName(name).CopyToProto(registered)
    bare = type(shipped)()
    bare.CopyFrom(shipped)
    bare.ClearField("source_code_info")
    for file in (bare, registered):
        clear_json_names(file)
    # Options of the contract's own are parsed where their file was imported before.
    assert type(bare).FromString(bare.SerializeToString()) == type(bare).FromString(
        registered.SerializeToString()
    )


def clear_json_names(file: descriptor_pb2.FileDescriptorProto) -> None:
    """Clear derived JSON names, which protoc writes into descriptor sets only."""
    fields = [field for message in file.message_type for field in message.field]
    for field in (*fields, *file.extension):
        field.ClearField("json_name")


def test_descriptor_set_is_complete() -> None:
    """All imports are included, in an order that can be loaded."""
    seen: set[str] = set()
    for file in schema.descriptor_set().file:
        assert set(file.dependency) <= seen
        seen.add(file.name)
    assert {f"legato/v1/{noun}.proto" for noun in NOUNS} <= seen


@pytest.mark.parametrize("noun", NOUNS)
def test_comments_are_those_of_the_source(noun: str) -> None:
    """The comments are those of the proto files, word for word."""
    source = " ".join((SOURCES / f"{noun}.proto").read_text().replace("//", " ").split())
    (shipped,) = [file for file in schema.files() if file.name == f"legato/v1/{noun}.proto"]
    for place in shipped.source_code_info.location:
        assert " ".join(place.leading_comments.split()) in source
