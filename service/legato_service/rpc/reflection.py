"""Server reflection with comments.

The generated code of the stock servicer has no comments; a descriptor set with source info has. v1
and v1alpha are the same on the wire.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection_pb2 as pb

from legato_service.rpc.call import Context

SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


class Descriptors:
    """Proto files by name and symbol; those without comments come from the generated pool."""

    def __init__(self, documented: descriptor_pb2.FileDescriptorSet) -> None:
        self._documented = {file.name: file for file in documented.file}
        self._pool = descriptor_pool.Default()
        # Only v1alpha has generated code.
        text = text_format.MessageToString(self._file(pb.DESCRIPTOR.name))
        version_1 = text_format.Parse(
            text.replace("v1alpha", "v1"), descriptor_pb2.FileDescriptorProto()
        )
        self._documented[version_1.name] = version_1
        self._more = descriptor_pool.DescriptorPool()
        self._more.Add(version_1)

    @classmethod
    def of_contract(cls) -> Descriptors:
        data = importlib.resources.files("legato.v1").joinpath("descriptor.binpb").read_bytes()
        return cls(descriptor_pb2.FileDescriptorSet.FromString(data))

    def with_dependencies(self, name: str) -> list[bytes]:
        """Serialize the file, then all its imports.

        Raises:
            KeyError: the name is unknown.
        """
        found: dict[str, descriptor_pb2.FileDescriptorProto] = {}
        waiting = [name]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found[name] = self._file(name)
                waiting.extend(found[name].dependency)
        return [file.SerializeToString() for file in found.values()]

    def file_of(self, symbol: str) -> str:
        """Find the file that defines a symbol.

        The pool finds no members of messages, enums and services; their parents do.

        Raises:
            KeyError: the symbol is unknown.
        """
        for pool in (self._pool, self._more):
            with suppress(KeyError):
                return pool.FindFileContainingSymbol(symbol).name
        parent = symbol.rpartition(".")[0]
        if not parent:
            raise KeyError(symbol)
        return self.file_of(parent)

    def _file(self, name: str) -> descriptor_pb2.FileDescriptorProto:
        if name in self._documented:
            return self._documented[name]
        file = descriptor_pb2.FileDescriptorProto()
        self._pool.FindFileByName(name).CopyToProto(file)
        return file


class Reflection:
    """Reflection service for `services` and the symbols of `descriptors`."""

    def __init__(self, services: Iterable[str], descriptors: Descriptors) -> None:
        self._services = sorted((*services, *SERVICES))
        self._descriptors = descriptors

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        method = grpc.stream_stream_rpc_method_handler(
            self._info,
            pb.ServerReflectionRequest.FromString,
            pb.ServerReflectionResponse.SerializeToString,
        )
        return [
            grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method})
            for name in SERVICES
        ]

    async def _info(
        self, requests: AsyncIterator[pb.ServerReflectionRequest], context: Context
    ) -> AsyncIterator[pb.ServerReflectionResponse]:
        async for request in requests:
            answer = self._answer(request)
            answer.valid_host = request.host
            answer.original_request.CopyFrom(request)
            yield answer

    def _answer(self, request: pb.ServerReflectionRequest) -> pb.ServerReflectionResponse:
        try:
            match request.WhichOneof("message_request"):
                case "file_by_filename":
                    return self._files(request.file_by_filename)
                case "file_containing_symbol":
                    return self._files(self._descriptors.file_of(request.file_containing_symbol))
                case "list_services":
                    listed = [pb.ServiceResponse(name=name) for name in self._services]
                    services = pb.ListServiceResponse(service=listed)
                    return pb.ServerReflectionResponse(list_services_response=services)
        except KeyError:
            return _error(grpc.StatusCode.NOT_FOUND, "unknown file or symbol")
        return _error(grpc.StatusCode.NOT_FOUND, "extensions are not supported")

    def _files(self, name: str) -> pb.ServerReflectionResponse:
        files = self._descriptors.with_dependencies(name)
        response = pb.FileDescriptorResponse(file_descriptor_proto=files)
        return pb.ServerReflectionResponse(file_descriptor_response=response)


def _error(code: grpc.StatusCode, message: str) -> pb.ServerReflectionResponse:
    error = pb.ErrorResponse(error_code=code.value[0], error_message=message)
    return pb.ServerReflectionResponse(error_response=error)
