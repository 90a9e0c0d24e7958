"""Blocking and asyncio transports of serialized requests.

`ClientMethods` is written once, as coroutines. Over a blocking channel each step blocks, so they
complete without an event loop.

`timeout` is the gRPC deadline in seconds, and a proxy chooses the server by `affinity`. Closing the
iterator of a stream early cancels the call. Failures are raised as `LegatoError`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from legato.v1 import inference_pb2

from legato_client import _errors
from legato_client._grpc.channel import GENERATE, StubMethod, message_of
from legato_client._grpc.settings import CallMetadata, ClientSettings
from legato_client._types import results

# ruff: noqa: ASYNC109 - `timeout` is the gRPC deadline: the server must know it too


ResponseT = TypeVar("ResponseT", bound=Message)
ValueT = TypeVar("ValueT")
Request = bytes | Iterator[bytes]
"""A request, or those of an upload."""


def _start_of(channel: Any, starts: dict[str, Any], path: str, request: Request) -> Any:
    """Return what starts a call of one response; gRPC takes a while to make it."""
    if path not in starts:
        make = channel.unary_unary if isinstance(request, bytes) else channel.stream_unary
        starts[path] = make(path)
    return starts[path]


# ---------------------------------------------------------------- async status

# Status of an asyncio call that the server ended during a write.

_FAILED_WRITE = "Internal error from Core"
_PATIENCE = 1.0  # seconds for the status of an ended call


class ServerStatus:
    """Recorder of a call's status, before grpc.aio overwrites it.

    When a call ends during a write, grpc.aio ends it with an INTERNAL of its own, whether or not
    the server's status is there. The call's callbacks get both.
    """

    def __init__(self, call: grpc.aio.Call) -> None:
        self._error: grpc.aio.AioRpcError | None = None
        self._known = asyncio.Event()
        call.add_done_callback(self._note)

    async def resolve(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """Return the real error of the call in place of one of grpc.aio itself."""
        if not _is_failed_write(error.code(), error.details()):
            return error
        try:
            await asyncio.wait_for(self._known.wait(), _PATIENCE)
        except TimeoutError:
            return error
        return self._error or error

    def _note(self, call: Any) -> None:
        code, details = run(call.code()), run(call.details())
        if not _is_failed_write(code, details):
            trailers = run(call.trailing_metadata())
            self._error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details)
            self._known.set()


def _is_failed_write(code: grpc.StatusCode, details: str | None) -> bool:
    return code is grpc.StatusCode.INTERNAL and details == _FAILED_WRITE


def run(call: Coroutine[Any, Any, ValueT]) -> ValueT:
    """Run a coroutine that never suspends: it may block, or ask a finished call."""
    try:
        call.send(None)
    except StopIteration as done:
        value: ValueT = done.value
        return value
    call.close()
    raise AssertionError("a coroutine suspended that must not")


# ---------------------------------------------------------------- async transport


CALLS_PER_CHANNEL = 100
"""Concurrent calls. Servers start a limited number per connection (Legato 256, proxies often 100);
gRPC queues further ones silently."""


class PooledChannel:
    """A channel with a connection of its own, and the calls that it carries."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.num_calls = 0
        self.starts: dict[str, Any] = {}  # of unary calls and uploads, by path

    def __enter__(self) -> grpc.aio.Channel:
        self.num_calls += 1
        return self.channel

    def __exit__(self, *_: object) -> None:
        self.num_calls -= 1

    def carry(self, call: grpc.aio.Call) -> None:
        self.num_calls += 1
        call.add_done_callback(self.__exit__)


class AsyncTransport:
    """Over `grpc.aio` channels, the first of which opens at the first call, in its loop."""

    def __init__(self, settings: ClientSettings) -> None:
        # Else gRPC makes it for every call.
        self.metadata = CallMetadata(settings, lambda own: grpc.aio.Metadata(*own)).current
        self._settings = settings
        self._channels: list[PooledChannel] = []

    def channel(self) -> PooledChannel:
        """Return the first channel with room for a call, which enters it while it runs."""
        for each in self._channels:
            if each.num_calls < CALLS_PER_CHANNEL:
                return each
        options = self._settings.channel_options
        options += (("grpc.use_local_subchannel_pool", 1),)  # or all share one connection
        opened = self._settings.security.open_channel(grpc.aio, self._settings.target, options)
        self._channels.append(PooledChannel(opened))
        return self._channels[-1]

    async def unary(
        self,
        method: StubMethod[ResponseT, ValueT],
        request: Request,
        timeout: float,
        affinity: str,
    ) -> ResponseT:
        pooled = self.channel()
        start = _start_of(pooled.channel, pooled.starts, method.path, request)
        with pooled:
            call = start(request, timeout=timeout, metadata=self.metadata(affinity))
            status = None if isinstance(request, bytes) else ServerStatus(call)
            try:
                return message_of(method.response, await call)
            except grpc.aio.AioRpcError as error:
                ended = error if status is None else await status.resolve(error)
                raise _errors.from_rpc_error(ended) from error

    async def stream(
        self, method: StubMethod[ResponseT, ValueT], request: bytes, timeout: float, affinity: str
    ) -> AsyncGenerator[ResponseT, None]:
        with self.channel() as channel:
            start: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
                method.path
            )
            call = start(request, timeout=timeout, metadata=self.metadata(affinity))
            try:
                async for message in call:
                    yield message_of(method.response, message)
            except grpc.RpcError as error:
                raise _errors.from_rpc_error(error) from error
            finally:
                call.cancel()

    async def run(self, work: Callable[[], ValueT]) -> ValueT:
        return await asyncio.to_thread(work)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        """Close the connection; a later call opens another."""
        channels, self._channels = self._channels, []
        for each in channels:
            await each.channel.close()


# ---------------------------------------------------------------- blocking transport

# ruff: noqa: ASYNC109, ASYNC251 - coroutines in shape only: they block by contract, see `run`


class BlockingTransport:
    """Over a `grpc` channel; every method does its work before it returns."""

    def __init__(self, settings: ClientSettings) -> None:
        self.metadata = CallMetadata(settings, lambda own: own).current
        self._starts: dict[str, Any] = {}  # of unary calls and uploads, by path
        self.channel: grpc.Channel = settings.security.open_channel(
            grpc, settings.target, settings.channel_options
        )

    async def unary(
        self,
        method: StubMethod[ResponseT, ValueT],
        request: Request,
        timeout: float,
        affinity: str,
    ) -> ResponseT:
        start = _start_of(self.channel, self._starts, method.path, request)
        try:
            data = start(request, timeout=timeout, metadata=self.metadata(affinity))
            return message_of(method.response, data)
        except grpc.RpcError as error:
            raise _errors.from_rpc_error(error) from error

    async def stream(
        self, method: StubMethod[ResponseT, ValueT], request: bytes, timeout: float, affinity: str
    ) -> AsyncGenerator[ResponseT, None]:
        start: grpc.UnaryStreamMultiCallable[bytes, bytes] = self.channel.unary_stream(method.path)
        call = start(request, timeout=timeout, metadata=self.metadata(affinity))
        try:
            for message in call:
                yield message_of(method.response, message)
        except grpc.RpcError as error:
            raise _errors.from_rpc_error(error) from error
        finally:
            call.cancel()

    async def run(self, work: Callable[[], ValueT]) -> ValueT:
        return work()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        self.channel.close()


Transport = AsyncTransport | BlockingTransport


_DELAYS = (0.05, 1.0, 3.0)
"""Seconds before each resumption at most: a proxy has another server at once, a name may need a
moment, and a server that was alone comes back."""


class EventReader:
    """Reader of a stream that checks its grammar and converts its messages.

    A broken path may end a stream with any code; the absence of `Finished` is what tells. Where
    the server sends checkpoints, events wait for the one that covers them, so that a stream that
    continues on another server repeats no event.
    """

    def __init__(self) -> None:
        self._next_index = 0
        self._begun = False  # some server has sent something
        self._started = False
        self._checkpoint: inference_pb2.Checkpoint | None = None
        self._request_id = ""
        self._uncovered: list[results.Event] = []
        self._finished: results.Finished | None = None
        self._num_resumptions = 0

    def read(self, message: inference_pb2.GenerateResponse) -> list[results.Event]:
        """Yield events for the caller; `Finished` is kept for the end.

        Raises IncompleteStream when an event was lost, and the task's own error when it failed.
        """
        if message.index != self._next_index:
            raise _errors.IncompleteStream(
                f"event {self._next_index} of the stream is missing, got {message.index}"
            )
        self._next_index += 1
        self._begun = True
        event = GENERATE.parse(message)
        if isinstance(event, results.Finished):
            self._finished = event
            return []
        if isinstance(event, results.Queued | results.Started):
            return self._opened(event, message)
        if event is not None:
            self._uncovered.append(event)
        if message.HasField("checkpoint"):
            self._add(message.checkpoint)
        elif self._checkpoint is not None:
            return []
        known, self._uncovered = self._uncovered, []
        return known

    def end(self) -> results.Finished:
        """Return the last event, once the stream ended with OK: stopping at it cancels nothing.

        Raises IncompleteStream when there was none.
        """
        if self._finished is None:
            raise _errors.IncompleteStream("the stream ended before the answer was finished")
        return self._finished

    def resumption(self, error: _errors.LegatoError, time_left: float) -> float | None:
        """Return the seconds until the stream may resume elsewhere, or None to raise the error."""
        if not self._can_resume(error) or self._num_resumptions == len(_DELAYS):
            return None
        # A lost server had many streams.
        delay = max(_DELAYS[self._num_resumptions] * random.uniform(0.5, 1), error.retry_after or 0)
        if delay >= time_left:
            return None
        self._num_resumptions += 1
        self._next_index = 0
        self._uncovered.clear()
        self._finished = None
        return delay

    def addition(self) -> bytes:
        """Return the bytes that, appended to the request, resume it; a parser merges them."""
        message = inference_pb2.GenerateRequest()
        if self._checkpoint is not None:
            message.resume_from.CopyFrom(self._checkpoint)
            message.options.request_id = self._request_id
        return message.SerializeToString()

    def _opened(
        self, event: results.Queued | results.Started, message: inference_pb2.GenerateResponse
    ) -> list[results.Event]:
        """Report the first server that starts the stream."""
        if message.HasField("checkpoint"):
            self._add(message.checkpoint)
        if self._started:
            return []
        if isinstance(event, results.Started):
            self._started = True
            self._request_id = event.request_id
        return [event]

    def _add(self, checkpoint: inference_pb2.Checkpoint) -> None:
        if self._checkpoint is None:
            self._checkpoint = inference_pb2.Checkpoint()
        self._checkpoint.MergeFrom(checkpoint)

    def _can_resume(self, error: _errors.LegatoError) -> bool:
        """Return whether the stream can resume.

        Before the first event gRPC itself has retried, and without checkpoints no stream can.

        A failure without a reason is not the server's: its connection was cut.
        """
        known = self._checkpoint is not None or not self._started
        if not (self._begun and known):
            return False
        if isinstance(error, _errors.Busy):
            return error.retry_after is not None and self._num_resumptions > 0
        return isinstance(error, _errors.Unavailable) or (
            isinstance(error, _errors.InternalError) and not error.reason
        )
