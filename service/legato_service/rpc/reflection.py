"""Server reflection with comments.

The stock servicer reads a descriptor pool, and generated code has no comments; a descriptor set
with source info has. v1 and v1alpha are the same on the wire.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable
from contextlib import suppress

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha import reflection_pb2 as pb

SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


class _Pool:
    """Proto files by name and symbol, as the stock servicer asks a descriptor pool for them.

    Those without comments come from the generated pool. Extensions are not supported.
    """

    def __init__(self) -> None:
        data = importlib.resources.files("legato.v1").joinpath("descriptor.binpb").read_bytes()
        contract = descriptor_pb2.FileDescriptorSet.FromString(data)
        # Only v1alpha has generated code.
        text = text_format.MessageToString(_generated(pb.DESCRIPTOR.name))
        version_1 = text_format.Parse(
            text.replace("v1alpha", "v1"), descriptor_pb2.FileDescriptorProto()
        )
        self._files = {file.name: file for file in (*contract.file, version_1)}
        more = descriptor_pool.DescriptorPool()
        more.Add(version_1)
        self._pools = (descriptor_pool.Default(), more)

    def FindFileByName(self, name: str) -> _File:  # noqa: N802 - as DescriptorPool
        return _File(self, self._files.get(name) or _generated(name))

    def FindFileContainingSymbol(self, symbol: str) -> _File:  # noqa: N802 - as DescriptorPool
        """Find the file that defines a symbol.

        Pools find no members of messages, enums and services; their parents do.
        """
        while symbol:
            for pool in self._pools:
                with suppress(KeyError):
                    return self.FindFileByName(pool.FindFileContainingSymbol(symbol).name)
            symbol = symbol.rpartition(".")[0]
        raise KeyError("unknown symbol")

    def FindMessageTypeByName(self, name: str) -> None:  # noqa: N802 - as DescriptorPool
        raise KeyError(name)  # only asked for extensions


class _File:
    """A file as the stock servicer reads a descriptor."""

    def __init__(self, pool: _Pool, proto: descriptor_pb2.FileDescriptorProto) -> None:
        self.name = proto.name
        self._pool = pool
        self._proto = proto

    @property
    def dependencies(self) -> list[_File]:
        return [self._pool.FindFileByName(name) for name in self._proto.dependency]

    def CopyToProto(self, proto: Message) -> None:  # noqa: N802 - as FileDescriptor
        proto.CopyFrom(self._proto)


def _generated(name: str) -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    descriptor_pool.Default().FindFileByName(name).CopyToProto(file)
    return file


def handlers(services: Iterable[str]) -> list[grpc.GenericRpcHandler]:
    """Return the handlers of a server with these services."""
    servicer = reflection.aio.ReflectionServicer((*services, *SERVICES), _Pool())
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        pb.ServerReflectionRequest.FromString,
        pb.ServerReflectionResponse.SerializeToString,
    )
    return [
        grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method})
        for name in SERVICES
    ]
