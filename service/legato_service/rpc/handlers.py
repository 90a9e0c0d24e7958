"""Parts of gRPC's handlers of methods."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError
from legato_engine.errors import InvalidRequest

from legato_service.errors import MethodUnknown
from legato_service.rpc import limits
from legato_service.rpc.call import CURRENT, ID_FORM
from legato_service.rpc.context import Context

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def behaviour(handler: Handler) -> Callable[[Any, Context], Any]:
    """What the handler runs: an async function or generator."""
    found: Any = (  # grpc types it for synchronous servers only
        handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary
    )
    return cast("Callable[[Any, Context], Any]", found)


def reader(handler: Handler) -> Callable[[Any], Any]:
    """Returns what checks and parses a message, or reads a call's messages, for the handler.

    With its own parsing, gRPC refuses malformed bytes with UNKNOWN and the parser's text.
    """
    parse: Any = handler.request_deserializer  # `FromString` of a message's class
    if parse is None:
        return lambda received: received
    kind = limits.kind_of(parse.__self__.DESCRIPTOR)

    def message(data: bytes) -> Any:
        try:
            kind.check(data)
        except InvalidRequest:
            given = kind.request_id(data)
            if ID_FORM.fullmatch(given):
                CURRENT.get().adopt(given)  # as the handler would have
            raise
        try:
            return parse(data)
        except DecodeError:
            raise InvalidRequest("the request is not a valid protobuf message") from None

    async def messages(context: Context) -> AsyncIterator[Any]:
        """Read by `read`: gRPC never frees its iterator of a call that is aborted, nor the last
        message in it.
        """
        principal = CURRENT.get().principal
        while (data := await context.read()) is not grpc.aio.EOF:
            if principal is not None:
                principal.check()
            yield message(data)

    return messages if handler.request_streaming else message


async def _unimplemented(received: Any, context: Context) -> NoReturn:
    raise MethodUnknown("this server does not have the method")


UNKNOWN: Handler = grpc.stream_unary_rpc_method_handler(_unimplemented)
"""Of methods that the server lacks."""
