"""A checked request's way to the engine and back: admit, submit, follow, and always let go."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
import msgspec
from legato_engine import core
from legato_engine.client import EngineState
from legato_engine.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    EngineStarting,
    ImageUndecodable,
    InternalError,
    InvalidField,
    ModelNotFound,
)
from legato_engine.messages import Done, ModelInfo, Started
from legato_engine.stream import StreamReport

from legato_service import call
from legato_service.engine import Engine, Stream
from legato_service.gate import Gate
from legato_service.picture import InlinePicture, Picture, PictureIntake

Context = grpc.aio.ServicerContext[Any, Any]


class Dispatcher:
    """Takes requests to the engine. One for all RPCs."""

    def __init__(self, engine: Engine, pictures: PictureIntake, gate: Gate) -> None:
        self.pictures = pictures
        self._engine = engine
        self._gate = gate

    @contextmanager
    def admit(self, request_id: str, context: Context, default_deadline: float) -> Iterator[float]:
        """Be in flight for the length of the block; yields the absolute monotonic deadline.

        Raises `Draining`, `DuplicateRequest`, `DeadlineExceeded` or `DeadlineUnreachable`.
        """
        with self._gate.hold(request_id):
            # None without a deadline, whatever the typing of grpc says.
            given: float | None = context.time_remaining()
            left = default_deadline if given is None else given
            wait = self._engine.estimated_wait
            if left <= 0:
                raise DeadlineExceeded("the deadline passed before the request began")
            # The guess is for the end of the queue: who may go before that asks the engine itself.
            last = call.current().priority <= 0
            if last and wait > left and self._engine.state is EngineState.READY:
                raise DeadlineUnreachable(
                    f"a request arriving now would wait {wait:.3g} s",
                    estimated_wait_ms=round(wait * 1000),
                    time_left_ms=round(left * 1000),
                )
            deadline = time.monotonic() + left
            call.current().deadline = deadline
            yield deadline

    def check(self, request: core.Request, path: str = "") -> ModelInfo:
        """The model that will answer; `path` leads to the request's field `sampling`.

        Raises `EngineStarting`, `ModelNotFound` or `InvalidField`.
        """
        model = self._engine.model
        if model is None:
            raise EngineStarting("the model is loading")
        if request.model not in ("", model.name):
            raise ModelNotFound(f"this server serves {model.name}", resource=request.model)
        asked = request.sampling.max_tokens
        if asked is not None and asked > model.max_output_tokens:
            raise InvalidField(
                f"at most {model.max_output_tokens}",
                field=f"{path}sampling.max_tokens",
                limit=model.max_output_tokens,
                actual=asked,
            )
        return model

    @contextmanager
    def submit(
        self, request: core.Request, picture: Picture, deadline: float, context: Context
    ) -> Iterator[Stream]:
        """The running request; however the block or the RPC ends, the engine forgets it.

        Nothing is awaited between staging, submitting and owning the stream, so no cancellation can
        come in between. Raises what `Engine.submit` raises. A picture that the engine cannot decode
        is told by the field it came in, which the engine does not know.
        """
        rpc = call.current()
        image = self.pictures.stage(picture)
        stream = self._engine.submit(
            msgspec.structs.replace(
                request, image=image, deadline=deadline, priority=rpc.priority, tenant=rpc.tenant
            )
        )
        # Also when the handler never gets to run its `finally`.
        context.add_done_callback(lambda _: stream.abort())  # type: ignore[arg-type]  # a nominal type in the stubs
        try:
            yield stream
        except ImageUndecodable as error:
            if isinstance(picture, InlinePicture):
                error.metadata["field"] = picture.field
            raise
        finally:
            stream.abort()


async def follow(
    stream: Stream, deadline: float, silence: float | None = None
) -> AsyncGenerator[StreamReport | None]:
    """The reports up to `Done`; None after each `silence` seconds without one.

    A report that is being waited for survives the silences: waiting is never restarted.
    Raises the request's own error, or `DeadlineExceeded` when the engine does not end it in time.
    """
    pending: asyncio.Future[StreamReport] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(stream.__anext__())
            left = deadline - time.monotonic()
            patience = min(left, math.inf if silence is None else silence)
            done, _ = await asyncio.wait({pending}, timeout=max(patience, 0))
            if done:
                report, pending = _result(pending), None
                _record(report)
                yield report
                if isinstance(report, Done):
                    return
            elif patience == left:
                raise DeadlineExceeded("the deadline passed")
            else:
                yield None
    finally:
        if pending is not None and not pending.cancel() and not pending.cancelled():
            pending.exception()  # seen, so that the loop does not complain of it


def _result(future: asyncio.Future[StreamReport]) -> StreamReport:
    try:
        return future.result()
    except StopAsyncIteration:
        raise InternalError("a stream ended without its result") from None


async def started(stream: Stream, deadline: float) -> Started:
    """The request's `Started`; what comes later is still to be followed."""
    async with aclosing(follow(stream, deadline)) as reports:
        async for report in reports:
            if isinstance(report, Started):
                return report
    raise InternalError("a request ended before it started")


async def outcome(stream: Stream, deadline: float) -> Done:
    """The request's `Done`; everything before it is repeated there. Raises as `follow` does."""
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            done = await stream.done()
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed") from None
    _record(done)
    return done


def _record(report: StreamReport) -> None:
    """Tell the log line what the request cost; several requests of one RPC add up."""
    if isinstance(report, Done):
        rpc = call.current()
        rpc.timings = report.timings
        rpc.usage = report.usage if rpc.usage is None else call.total((rpc.usage, report.usage))
