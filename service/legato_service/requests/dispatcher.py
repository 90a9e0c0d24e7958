"""A checked request's way to the engine and back: admit, submit, follow, and always let go."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, closing
from typing import Protocol

import msgspec
from legato_engine import core
from legato_engine.client.engine_client import EngineState
from legato_engine.client.request_stream import StreamOutput
from legato_engine.core import RequestKey
from legato_engine.errors import (
    AdapterNotFound,
    DeadlineExceeded,
    DeadlineUnreachable,
    EngineStarting,
    InternalError,
    InvalidField,
    ModelNotFound,
    Preempted,
)
from legato_engine.ipc.messages import Done, ModelInfo, Started

from legato_service.engine import Engine, Stream
from legato_service.images.intake import ImageIntake, NewPicture, Picture
from legato_service.requests.deadlines import Deadlines
from legato_service.requests.registry import ActiveRequest, RequestRegistry
from legato_service.rpc import call
from legato_service.rpc.reusable_timeout import ReusableTimeout

_CANCELLED = core.FinishReason.CANCELLED  # members of an enum are dear to look up


class Caller(Protocol):
    """Who waits for an answer: the context of an RPC, or several of them together."""

    def time_remaining(self) -> float | None:
        """Seconds left to answer, None without a deadline."""
        ...


class Dispatcher:
    """Takes requests to the engine. One for all RPCs."""

    def __init__(self, engine: Engine, pictures: ImageIntake, gate: RequestRegistry) -> None:
        self.pictures = pictures
        self._engine = engine
        self._gate = gate
        self._deadlines = Deadlines()

    def key(self, given: str) -> RequestKey:
        """The key of the current call's request: the caller's, else one that nobody in flight has.

        Raises `InvalidField` when the caller's is malformed.
        """
        rpc = call.current()
        return rpc.adopt(given) if given else rpc.avoid(self._gate)

    def admit(self, key: RequestKey, caller: Caller, default_deadline: float) -> ActiveRequest:
        """To be in flight for the length of a block.

        Raises `Draining`, `DuplicateRequest`, `DeadlineExceeded` or `DeadlineUnreachable`.
        """
        rpc = call.current()
        self._gate.check(key)
        given = caller.time_remaining()
        left = default_deadline if given is None else given
        wait = self._engine.estimated_wait
        if left <= 0:
            raise DeadlineExceeded("the deadline passed before the request began")
        # The guess is for the end of the queue: who may go before that asks the engine itself.
        last = rpc.priority <= 0
        if last and wait > left and self._engine.state is EngineState.READY:
            raise DeadlineUnreachable(
                f"a request arriving now would wait {wait:.3g} s",
                estimated_wait_ms=round(wait * 1000),
                time_left_ms=round(left * 1000),
            )
        rpc.deadline = deadline = time.monotonic() + left
        return self._gate.enter(key, deadline)

    def model(self, name: str, adapter: str = "") -> ModelInfo:
        """The model of this name, empty for the default one.

        Raises `EngineStarting` or `ModelNotFound`, and `AdapterNotFound` where there are none; of
        those that there are only the engine knows.
        """
        model = self._engine.model
        if model is None:
            raise EngineStarting("the model is loading")
        if name not in ("", model.name):
            raise ModelNotFound(f"this server serves {model.name}", resource=name)
        if adapter and not model.adapters:
            raise AdapterNotFound("this server holds no adapters", resource=adapter)
        return model

    def check(self, request: core.Request, path: str = "") -> ModelInfo:
        """The model that will answer; `path` leads to the request's field `sampling`.

        Raises `EngineStarting`, `ModelNotFound`, `AdapterNotFound` or `InvalidField`.
        """
        model = self.model(request.model, request.adapter)
        asked = request.sampling.max_tokens
        if asked is not None and asked > model.max_output_tokens:
            raise InvalidField(
                f"at most {model.max_output_tokens}",
                field=f"{path}sampling.max_tokens",
                limit=model.max_output_tokens,
                actual=asked,
            )
        return model

    def submit(self, request: core.Request, picture: Picture, visit: ActiveRequest) -> Stream:
        """Start the request, or a part of it, for the length of its visit.

        Nothing is awaited between staging, submitting and owning the stream, so no cancellation can
        come in between. The visit ends with its task at the latest, so nobody else has to be told:
        a callback on an RPC's context would tie the two into a cycle, and keep all that the call
        held until a garbage collection. Raises what `Engine.submit` raises.
        """
        rpc = call.current()
        image = None if picture is None else self.pictures.stage(picture)
        stream = self._engine.submit(
            msgspec.structs.replace(
                request,
                image=image,
                deadline=visit.deadline,
                priority=rpc.priority,
            )
        )
        field = picture.field if isinstance(picture, NewPicture) else ""
        visit.own(stream, self._deadlines, field)
        return stream


async def follow(stream: Stream, silence: float = math.inf) -> AsyncGenerator[StreamOutput | None]:
    """The reports up to `Done`; None after each `silence` seconds without one.

    Raises the request's own error.
    """
    with closing(ReusableTimeout()) as patience:
        read: Callable[[], Awaitable[StreamOutput | None]]
        if silence == math.inf:
            read = stream.__anext__
        else:
            read = functools.partial(_heard, stream, patience, silence)
        report: StreamOutput | None = None
        while not isinstance(report, Done):
            try:
                report = await read()
            except StopAsyncIteration:
                raise InternalError("a stream ended without its result") from None
            if isinstance(report, Done):
                _record(report)
            yield report


async def _heard(stream: Stream, patience: ReusableTimeout, silence: float) -> StreamOutput | None:
    """The next report, or None after so many seconds; cut short, a read loses nothing."""
    try:
        with patience.until(time.monotonic() + silence):
            return await stream.__anext__()
    except TimeoutError:
        return None


async def started(stream: Stream) -> Started:
    """The request's `Started`; what comes later is still to be followed."""
    async with aclosing(follow(stream)) as reports:
        async for report in reports:
            if isinstance(report, Started):
                return report
    raise InternalError("a request ended before it started")


def answered(done: Done) -> Done:
    """The `Done` of a unary call's request, which says everything that came before it.

    Raises `Preempted` where an operator stopped it.
    """
    _record(done)
    if done.finish_reason is _CANCELLED:
        raise Preempted("an operator stopped the request")
    return done


def _record(done: Done) -> None:
    """Tell the log line what the request cost; several requests of one RPC add up."""
    rpc = call.current()
    rpc.timings = done.timings
    rpc.usage = done.usage if rpc.usage is None else call.total((rpc.usage, done.usage))
