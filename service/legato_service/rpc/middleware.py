"""The outermost layer: names the RPC, maps its failure once, tells the log how it ended.

Handlers of every kind run as coroutines that write: a peer that goes away then reaches the handler
as CancelledError at an await, and an async generator is closed in its own task, its `finally`
blocks included. CancelledError is always re-raised: swallowing it leaks memory in grpc.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import aclosing, closing
from typing import Any, NoReturn, TypeAlias, cast

import grpc
import structlog
from google.protobuf.message import DecodeError
from legato_engine.errors import ClientTooSlow, InternalError, InvalidRequest, LegatoError

from legato_service.errors import Failure, failure
from legato_service.rpc import metadata
from legato_service.rpc.call import CURRENT, Call
from legato_service.rpc.call_log import RpcLog
from legato_service.rpc.context import Context
from legato_service.rpc.metadata import REQUEST_ID
from legato_service.rpc.reusable_timeout import ReusableTimeout

log = structlog.get_logger("legato.rpc")

_ASKS = "/legato.v1.InferenceService/"

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # here every message is opaque


class RpcMiddleware(grpc.GenericRpcHandler):
    """Wraps every handler that is added to it; `stall_timeout` seconds is how long a peer may take
    no message, `rpc_log` is told how each call ended, and `expect` is called when a question comes
    whose message is not read yet.

    It stands where the server looks for handlers, and not as an interceptor: those cost every call
    a coroutine more.
    """

    def __init__(
        self, stall_timeout: float, rpc_log: RpcLog, expect: Callable[[], None] = lambda: None
    ) -> None:
        self._expect = expect
        self._stall_timeout = stall_timeout
        self._rpc_log = rpc_log
        self._added: list[grpc.GenericRpcHandler] = []
        self._known: dict[str, Handler] = {}  # by method, wrapped; a server's handlers never change

    @property
    def as_server(self) -> grpc.aio.Server:
        """Itself, where generated code asks for a server and only adds its handlers to it."""
        return cast("grpc.aio.Server", self)

    def add_generic_rpc_handlers(
        self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]
    ) -> None:
        """As a server's, for generated code to call."""
        self._added.extend(generic_rpc_handlers)

    def add_registered_method_handlers(self, *_: object) -> None:
        """As an asyncio server's, which looks for generic handlers only."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """The wrapped handler; an unknown method stays grpc's to refuse."""
        method = handler_call_details.method
        if method.startswith(_ASKS):
            self._expect()
        wrapped = self._known.get(method)
        if wrapped is None:
            found = (each.service(handler_call_details) for each in self._added)
            handler = next((each for each in found if each is not None), None)
            if handler is None:
                return None
            wrapped = self._known[method] = self._wrapped(handler)
        # gRPC looks for a handler and runs it in one task, so the handler finds its call there. To
        # ask its context for the metadata would convert all of it a second time.
        CURRENT.set(Call(method, metadata=handler_call_details.invocation_metadata or ()))
        return wrapped

    def _wrapped(self, handler: Handler) -> Handler:
        serialize = handler.response_serializer
        if handler.response_streaming:
            many = self._many(handler)
            if handler.request_streaming:
                return grpc.stream_stream_rpc_method_handler(many, None, serialize)
            return grpc.unary_stream_rpc_method_handler(many, None, serialize)
        one = self._one(handler)
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(one, None, None)
        return grpc.unary_unary_rpc_method_handler(one, None, None)

    def _one(self, handler: Handler) -> Callable[[Any, Context], Any]:
        """What answers with one message, as bytes."""
        inner, read = _behaviour(handler), _reader(handler)
        streams, serialize = handler.request_streaming, handler.response_serializer

        async def one(received: Any, context: Context) -> Any:
            call = CURRENT.get()
            try:
                metadata.read(call)
                if not streams:
                    call.received = received
                response = await inner(read(received), context)
                if serialize is not None and not isinstance(response, bytes):
                    response = serialize(response)
            except BaseException as error:
                if (outcome := self._failed(error, call, context)) is None:
                    raise
            else:
                self._end(call, context)
                return response
            aborting = _abort(outcome, call, context)
            del received, context  # the abort leads to this frame
            return await aborting

        return one

    def _many(self, handler: Handler) -> Callable[[Any, Context], Any]:
        """What answers with a stream of messages."""
        inner, read = _behaviour(handler), _reader(handler)

        async def many(received: Any, context: Context) -> None:
            call = CURRENT.get()
            try:
                metadata.read(call)
                async with aclosing(inner(read(received), context)) as responses:
                    await self._write(responses, context, call)
            except BaseException as error:
                if (outcome := self._failed(error, call, context)) is None:
                    raise
            else:
                self._end(call, context)
                return
            aborting = _abort(outcome, call, context)
            del received, context  # the abort leads to this frame
            await aborting

        return many

    async def _write(self, responses: AsyncIterator[Any], context: Context, call: Call) -> None:
        """Write all; initial metadata goes with the first message.

        A call refused before that is still retryable by the client's own policy.
        """
        first = True
        with closing(ReusableTimeout()) as patience:
            async for response in responses:
                if first:
                    await context.send_initial_metadata(((REQUEST_ID, call.request_id),))
                    first = False
                try:
                    with patience.until(time.monotonic() + self._stall_timeout):
                        await context.write(response)
                except TimeoutError:
                    raise ClientTooSlow(
                        f"no message was taken for {self._stall_timeout:g} s",
                        limit_ms=round(self._stall_timeout * 1000),
                    ) from None

    def _end(self, call: Call, context: Context) -> None:
        """It went well."""
        context.set_trailing_metadata(((REQUEST_ID, call.request_id),))
        self._rpc_log.tell(call, "OK")

    def _failed(self, error: BaseException, call: Call, context: Context) -> Failure | None:
        """It did not: log why. What the caller is to hear, None where grpc knows it already."""
        match error:
            case asyncio.CancelledError():
                late = call.deadline is not None and time.monotonic() >= call.deadline
                self._rpc_log.tell(call, "DEADLINE_EXCEEDED" if late else "CANCELLED")
            case grpc.aio.AbortError():  # the handler answered with a status of its own
                self._rpc_log.tell(call, _code_name(context))
            case Exception():
                if isinstance(error, InternalError):
                    log.error("internal_error", request_id=call.request_id, exc_info=error)
                elif not isinstance(error, LegatoError):
                    log.error("uncaught_exception", request_id=call.request_id, exc_info=error)
                outcome = failure(error, call.request_id)
                self._rpc_log.tell(call, outcome.code.name, outcome.reason)
                return outcome
        return None


def _abort(outcome: Failure, call: Call, context: Context) -> Coroutine[Any, Any, NoReturn]:
    """What ends the call; for a peer that reads nothing it may wait as long as its connection.

    To be awaited when its cause is handled, by a frame that has forgotten the RPC: gRPC keeps the
    exception of an abort in the RPC's state, and that keeps the exception in whose midst it came,
    and the frames that both passed.
    """
    trailers = (*outcome.trailers(), (REQUEST_ID, call.request_id))
    return context.abort(outcome.code, outcome.message, trailers)


def _behaviour(handler: Handler) -> Callable[[Any, Context], Any]:
    """The handler's function; streaming ones are async generators throughout this server."""
    behaviour: Any = (  # grpc types it for synchronous servers only
        handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary
    )
    return cast("Callable[[Any, Context], Any]", behaviour)


def _reader(handler: Handler) -> Callable[[Any], Any]:
    """What parses the bytes of a request, or those of one after another, on this side.

    grpc's own parsing answers malformed bytes with UNKNOWN and the parser's text.
    """
    parse = handler.request_deserializer

    def message(data: bytes) -> Any:
        try:
            return parse(data) if parse else data
        except DecodeError:
            raise InvalidRequest("the request is not a valid protobuf message") from None

    async def messages(received: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in received:
            yield message(data)

    return messages if handler.request_streaming else message


def _code_name(context: Context) -> str:
    code = context.code()
    names = (known.name for known in grpc.StatusCode if code in (known, known.value[0]))
    return next(names, "UNKNOWN")
