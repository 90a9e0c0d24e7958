"""RPC middleware: naming, access, errors, logging."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from contextlib import aclosing, closing
from typing import Any, NoReturn, TypeAlias, cast

import grpc
import structlog
from google.protobuf.message import DecodeError
from legato_engine.errors import (
    ClientTooSlow,
    InternalError,
    InvalidRequest,
    LegatoError,
    NumericError,
    PoisonedRequest,
    exhaustion,
)

from legato_service.access.control import AccessControl
from legato_service.access.credentials import Peer
from legato_service.access.principal import NEEDS, UNKNOWN_METHOD, Need
from legato_service.errors import Failure, MethodUnknown, failure
from legato_service.rpc import limits
from legato_service.rpc.call import CURRENT, ID_FORM, REQUEST_ID, Call, Context, senders
from legato_service.rpc.call import read as read_metadata
from legato_service.rpc.call_log import CallLog
from legato_service.rpc.gate import COPY_SECONDS, Gate, ReceiveLimit, UnfinishedMessages
from legato_service.rpc.reusable_timeout import ReusableTimeout

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Receive: TypeAlias = "Callable[[Call, Context], Coroutine[Any, Any, Any]]"


def behaviour(handler: Handler) -> Callable[[Any, Context], Any]:
    """Return the async function or generator that the handler runs."""
    found: Any = (  # grpc types it for synchronous servers only
        handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary
    )
    return cast("Callable[[Any, Context], Any]", found)


def reader(handler: Handler, receive: Receive, receive_later: Receive) -> Callable[[Any], Any]:
    """Return the checking parser of a message, or the reader of a call's messages.

    With its own parsing, gRPC refuses malformed bytes with UNKNOWN and the parser's text. A reader
    gets the first message by `receive`, and all of a stream that has one response; the others by
    `receive_later`, because a stream that responds as it goes is silent between its messages.
    """
    takes_all = not handler.response_streaming
    parse: Any = handler.request_deserializer  # `FromString` of a message's class
    if parse is None:
        return lambda received: received
    kind = limits.kind_of(parse.__self__.DESCRIPTOR)

    def message(data: bytes) -> Any:
        begun = time.perf_counter()
        try:
            kind.check(data)
            return parse(data)
        except DecodeError:
            raise InvalidRequest("the request is not a valid protobuf message") from None
        except InvalidRequest:
            given = kind.request_id(data)
            if ID_FORM.fullmatch(given):
                CURRENT.get().adopt(given)  # as the handler would have
            raise
        finally:
            CURRENT.get().seconds_held = len(data) * COPY_SECONDS + time.perf_counter() - begun

    async def messages(context: Context) -> AsyncIterator[Any]:
        """Yield checked messages.

        They come from `read`: gRPC never frees its iterator of an aborted call, nor the last
        message.
        """
        call = CURRENT.get()
        data = await receive(call, context)
        while data is not grpc.aio.EOF:
            if call.principal is not None:
                call.principal.check()
            yield message(data)
            data = await (receive if takes_all else receive_later)(call, context)

    return messages if handler.request_streaming else message


async def _unimplemented(received: Any, context: Context) -> NoReturn:
    raise MethodUnknown("this server does not have the method")


UNKNOWN: Handler = grpc.stream_unary_rpc_method_handler(_unimplemented)
"""Handler of methods that the server lacks."""


# ---------------------------------------------------------------- middleware

# A disconnected client reaches its handler as CancelledError at an await; an async generator is
# closed in its own task. CancelledError is always re-raised, because gRPC leaks memory otherwise.

log = structlog.get_logger("legato.rpc")

_INFERENCE = ("/legato.v1.InferenceService/", "/inference.GRPCInferenceService/ModelInfer")
_LATE = 1.0  # seconds after which a missing message counts as late
_LATE_FOR_OTHERS = 5.0  # seconds to receive a message while other calls wait for a place
_EXPECTED_INTERNAL_ERRORS = (NumericError, PoisonedRequest)  # traceback adds nothing


class _CertificateNeeded(Exception):
    """Raised to authorize a call without a token by its connection's certificate."""


def _no_certificate() -> NoReturn:
    raise _CertificateNeeded


class RpcMiddleware(grpc.GenericRpcHandler):
    """Middleware around every handler that is added to it.

    A client that takes no message of its stream for `stall_timeout` seconds is disconnected.
    `expect` is called when a request for the engine arrives, before its message is read. With
    `access` every call needs a credential that allows it. `gate` admits the calls of
    InferenceService and ModelInfer. A message is received once `receive_limit` has a place for it,
    so for gRPC all calls are streams: it would receive the message of a unary call at once. The
    server finds its handlers here, because an interceptor would cost every call one more coroutine.
    """

    def __init__(
        self,
        stall_timeout: float,
        call_log: CallLog,
        receive_limit: ReceiveLimit,
        expect: Callable[[], None] = lambda: None,
        access: AccessControl | None = None,
        gate: Gate | None = None,
    ) -> None:
        self._expect = expect
        self._access = access
        self._gate = gate
        self._stall_timeout = stall_timeout
        self._receive_limit = receive_limit
        self._call_log = call_log
        self._starts, self._on_done = call_log.starts, call_log.on_done
        self._unfinished = UnfinishedMessages()
        self._receiving: dict[Call, asyncio.Task[Any]] = {}  # without their message, in order
        self._sweeping: asyncio.TimerHandle | None = None
        self._added: list[grpc.GenericRpcHandler] = []
        self._wrapped: dict[str, Handler] = {}  # by method
        self._unread: dict[str, Handler] = {}  # the same, which decide before they read a request
        self._unknown = self._wrap(UNKNOWN)

    @property
    def as_server(self) -> grpc.aio.Server:
        return cast("grpc.aio.Server", self)

    def add_generic_rpc_handlers(
        self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]
    ) -> None:
        self._added.extend(generic_rpc_handlers)

    def add_registered_method_handlers(self, *_: object) -> None:
        """Do nothing, as asyncio servers do."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        method = handler_call_details.method
        wrapped = self._wrapped.get(method) or self._found(handler_call_details)
        if wrapped is None:
            if self._access is None:
                return None
            # Do not reveal method names to unauthenticated callers.
            wrapped, method = self._unknown, UNKNOWN_METHOD
        given = handler_call_details.invocation_metadata or ()
        call = Call(method, metadata=given, on_done=self._on_done)
        # gRPC looks up a handler and runs it in one task, so the handler finds its call there. The
        # context would convert all metadata a second time.
        CURRENT.set(call)
        if self._starts is not None:
            self._starts[method] += 1
        task = asyncio.current_task()
        assert task is not None, "gRPC runs each call in a task"
        is_inference = method.startswith(_INFERENCE)
        if is_inference and (gate := self._gate) is not None:
            call.gate_slot = gate.enter(task)
            if gate.is_crowded:
                return self._unread[method]
        if self._access is not None and not self._is_authorized(call):
            return self._unread.get(method, wrapped)
        if is_inference:
            self._expect()
        return wrapped

    async def _receive(self, call: Call, context: Context) -> Any:
        """Return the next message, or EOF; what a late one holds is freed by the call's end.

        Raises:
            ClientTooSlow: it does not arrive in time.
        """
        task = asyncio.current_task()
        assert task is not None, "gRPC runs each call in a task"
        limit = self._receive_limit
        sender, connection = call.senders = call.senders or senders(call, context)
        self._receiving[call] = task
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(_LATE, self._sweep)
        try:
            if not limit.take(sender, connection):
                if call.gate_slot is not None:
                    call.gate_slot.pause()  # the place is for calls that are on their way
                await limit.wait(sender, connection)
            call.receiving_since = time.monotonic()
            try:
                message = await context.read()
            finally:
                limit.give_back(sender)
        except asyncio.CancelledError:
            if not call.is_late:
                raise
            task.uncancel()
            seconds = time.monotonic() - call.receiving_since
            raise ClientTooSlow(
                f"the message did not arrive within {seconds:.0f} s", limit_ms=round(seconds * 1000)
            ) from None
        finally:
            call.receiving_since = math.inf
            self._receiving.pop(call, None)
        if call.gate_slot is not None:
            call.gate_slot.resume()
        self._unfinished.note(context, message)
        return message

    async def _receive_later(self, call: Call, context: Context) -> Any:
        """Return a later message of a stream, or EOF. Raises ClientTooSlow."""
        assert call.senders is not None, "its first message was received"
        sender = call.senders[1]
        message = await self._unfinished.read(context.read(), context.peer(), sender)
        self._unfinished.note(context, message)
        return message

    async def _message(self, call: Call, context: Context) -> Any:
        message = await self._receive(call, context)
        if message is grpc.aio.EOF:
            raise InvalidRequest("the call ended without a message")
        return message

    def _sweep(self) -> None:
        """Pause the gate's places of late messages, and end calls that take too long."""
        now = time.monotonic()
        patience = self._stall_timeout
        if self._receive_limit.is_wanted:
            patience = min(patience, _LATE_FOR_OTHERS)
        for call, task in list(self._receiving.items()):
            if task.done():  # the client has cancelled it
                self._receiving.pop(call, None)
                continue
            if call.gate_slot is not None and now - call.started >= _LATE:
                call.gate_slot.pause()
            if now - call.receiving_since >= patience and not call.is_late:
                call.is_late = True
                task.cancel()
        self._sweeping = None
        if self._receiving:
            self._sweeping = asyncio.get_running_loop().call_later(
                min(_LATE, self._stall_timeout), self._sweep
            )

    def _is_authorized(self, call: Call) -> bool:
        """Return whether the call may be read: its credential is in its metadata and allows it.

        Otherwise it is decided with the call's context, which knows the client's certificate and
        takes the refusal.
        """
        try:
            self._enter(call, _no_certificate)
        except _CertificateNeeded:
            return False
        except LegatoError as error:
            call.refusal = error.with_traceback(None)  # its frames refer to the call
            return False
        return True

    def _found(self, details: grpc.HandlerCallDetails) -> Handler | None:
        found = (each.service(details) for each in self._added)
        handler = next((each for each in found if each is not None), None)
        if handler is None:
            return None
        method = details.method
        wrapped = self._wrapped[method] = self._wrap(handler)
        gate = self._gate if method.startswith(_INFERENCE) else None
        if not handler.request_streaming:
            self._unread[method] = self._wrap_unread(wrapped, gate)
        return wrapped

    def _wrap(self, handler: Handler) -> Handler:
        inner, read = behaviour(handler), reader(handler, self._receive, self._receive_later)
        takes_stream, streams = handler.request_streaming, handler.response_streaming
        serialize = handler.response_serializer

        async def handle(received: Any, context: Context) -> Any:
            call = CURRENT.get()
            try:
                if not takes_stream:
                    received = await self._message(call, context)
                    if not streams:
                        call.received = received
                self._identify(call, context)
                handling = inner(read(context if takes_stream else received), context)
                response = await (self._write(handling, context, call) if streams else handling)
                if serialize is not None and not streams:  # a failure is then as any other
                    response = serialize(response)
            except BaseException as error:
                if (outcome := self._failed(error, call, context)) is None:
                    raise
            else:
                self._succeeded(call, context)
                return response
            aborting = _abort(outcome, call, context)
            del received, context  # the abort refers to this frame
            return await aborting

        if streams:
            return grpc.stream_stream_rpc_method_handler(handle, None, serialize)
        return grpc.stream_unary_rpc_method_handler(handle, None, None)

    def _wrap_unread(self, wrapped: Handler, gate: Gate | None) -> Handler:
        """Decide before the message is received, with no more than a status as the response."""
        handle, streams = behaviour(wrapped), wrapped.response_streaming

        async def unread(received: Any, context: Context) -> None:
            call = CURRENT.get()
            if self._is_refused(gate, call, context):
                return
            if gate is not None:
                self._expect()
            handling = handle(received, context)
            try:
                answer = await handling
            except BaseException:
                del received, context  # an abort refers to this frame
                raise
            if not streams:
                await context.write(answer)

        serialize = wrapped.response_serializer
        return grpc.stream_stream_rpc_method_handler(unread, None, serialize)

    def _is_refused(self, gate: Gate | None, call: Call, context: Context) -> bool:
        """Set the status of a refused call, which costs neither an exception nor a message."""
        try:
            self._identify(call, context)
        except Exception as error:  # noqa: BLE001 - as any failure of a call
            outcome = self._failed(error, call, context)
            assert outcome is not None, "no cancellation"
        else:
            if gate is None or gate.admits(call.tenant, call.priority):
                return False
            outcome = gate.refusal(call.request_id)
            self._call_log.record(call, outcome.code.name, outcome.reason)
        _set_status(outcome, call, context)
        return True

    def _identify(self, call: Call, context: Context) -> None:
        """Fill the call from credential and metadata; its tenant and priority are final then."""
        if call.is_identified:
            return
        if self._access is not None and not call.is_let_in:
            self._enter(call, context.auth_context)
        read_metadata(call)
        call.is_identified = True
        if (gate_slot := call.gate_slot) is not None:
            gate_slot.take_name(call.tenant)

    def _enter(self, call: Call, peer: Callable[[], Peer]) -> None:
        """Admit the call as its credential allows."""
        assert self._access is not None, "only called with access control"
        if call.refusal is not None:
            try:
                raise call.refusal
            finally:
                call.refusal = None
        given, call.metadata = call.metadata, ()  # also a refused call forgets its secret
        try:
            principal = self._access.authorize(call.method, given, peer)
        except _CertificateNeeded:
            call.metadata = given
            raise
        call.metadata = given
        call.is_let_in = True
        call.principal = principal
        # An operator names the tenant whose request is meant.
        if principal is not None and NEEDS.get(call.method) is not Need.ADMIN:
            call.tenant = principal.tenant

    async def _write(self, responses: AsyncGenerator[Any], context: Context, call: Call) -> None:
        """Write all responses; the initial metadata goes with the first.

        Before that, the client's own retry policy may still repeat the call.
        """
        first, principal = True, call.principal
        async with aclosing(responses):
            with closing(ReusableTimeout()) as timeout:
                async for response in responses:
                    if principal is not None:
                        principal.check()
                    if first:
                        await context.send_initial_metadata(((REQUEST_ID, call.request_id),))
                        first = False
                    try:
                        with timeout.until(time.monotonic() + self._stall_timeout):
                            await context.write(response)
                    except TimeoutError:
                        raise ClientTooSlow(
                            f"no message was taken for {self._stall_timeout:g} s",
                            limit_ms=round(self._stall_timeout * 1000),
                        ) from None

    def _succeeded(self, call: Call, context: Context) -> None:
        context.set_trailing_metadata(((REQUEST_ID, call.request_id),))
        self._call_log.record(call, "OK")

    def _failed(self, error: BaseException, call: Call, context: Context) -> Failure | None:
        """Log the failure; return the status to send, or None if gRPC has it."""
        match error:
            case asyncio.CancelledError():
                late = call.deadline is not None and time.monotonic() >= call.deadline
                self._call_log.record(call, "DEADLINE_EXCEEDED" if late else "CANCELLED")
            case grpc.aio.AbortError():  # the handler set a status of its own
                self._call_log.record(call, _code_name(context))
            case Exception():
                if isinstance(error, InternalError) and not isinstance(
                    error, _EXPECTED_INTERNAL_ERRORS
                ):
                    log.error("internal_error", request_id=call.request_id, exc_info=error)
                elif exhaustion(error) is not None:
                    log.warning("resources_exhausted", request_id=call.request_id, error=str(error))
                elif not isinstance(error, LegatoError):
                    log.error("uncaught_exception", request_id=call.request_id, exc_info=error)
                outcome = failure(error, call.request_id)
                if outcome.code is grpc.StatusCode.INVALID_ARGUMENT and call.senders is not None:
                    self._receive_limit.charge(call.senders[1], call.seconds_held)
                self._call_log.record(call, outcome.code.name, outcome.reason)
                return outcome
        return None


def _set_status(outcome: Failure, call: Call, context: Context) -> None:
    context.set_code(outcome.code)
    context.set_details(outcome.message)
    context.set_trailing_metadata((*outcome.trailers(), (REQUEST_ID, call.request_id)))


def _abort(outcome: Failure, call: Call, context: Context) -> Coroutine[Any, Any, NoReturn]:
    """Return the coroutine that ends the call; it may wait as long as the connection lasts.

    Await it outside of the `except` block, in a frame without references to the RPC: gRPC keeps the
    exception of an abort, with the one being handled and the frames that both passed through.
    """
    trailers = (*outcome.trailers(), (REQUEST_ID, call.request_id))
    return context.abort(outcome.code, outcome.message, trailers)


def _code_name(context: Context) -> str:
    code = context.code()
    names = (known.name for known in grpc.StatusCode if code in (known, known.value[0]))
    return next(names, "UNKNOWN")
