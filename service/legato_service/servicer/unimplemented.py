"""What the contract has and this server has not: a plain UNIMPLEMENTED that says so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from legato_service.dispatch import Context


def handler(service: ServiceDescriptor) -> grpc.GenericRpcHandler:
    """Answers every RPC of `service`, whatever it is sent."""
    methods = {method.name: _refusal(method) for method in service.methods}
    return grpc.method_handlers_generic_handler(service.full_name, methods)


async def refuse(method: str, context: Context) -> NoReturn:
    """End the call of a method, given by its full name."""
    message = f"{method} is not built in this server"
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, message)


def _refusal(method: MethodDescriptor) -> grpc.RpcMethodHandler[Any, Any]:
    async def one(request: object, context: Context) -> None:
        await refuse(method.full_name, context)

    async def many(request: object, context: Context) -> AsyncIterator[bytes]:
        await one(request, context)
        yield b""  # makes this an async generator, as all streaming handlers here are

    if method.client_streaming and method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(many)
    if method.client_streaming:
        return grpc.stream_unary_rpc_method_handler(one)
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(many)
    return grpc.unary_unary_rpc_method_handler(one)
