"""A checked request's way to the engine and back: admit, submit, follow, and always let go."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, closing, contextmanager
from typing import Any, Protocol

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
    Preempted,
)
from legato_engine.messages import Done, ModelInfo, Started
from legato_engine.stream import StreamReport

from legato_service import call
from legato_service.engine import Engine, Stream
from legato_service.gate import Admitted, Gate
from legato_service.patience import Patience
from legato_service.picture import NewPicture, Picture, PictureIntake

Context = grpc.aio.ServicerContext[Any, Any]


class Caller(Protocol):
    """Who waits for an answer: the context of an RPC, or several of them together."""

    def time_remaining(self) -> float | None:
        """Seconds left to answer, None without a deadline."""
        ...

    def add_done_callback(self, callback: Any, /) -> None:
        """Call back with one argument when nobody waits any more, for whatever reason.

        Untyped: the typing of grpc has a nominal type here.
        """
        ...


class Dispatcher:
    """Takes requests to the engine. One for all RPCs."""

    def __init__(self, engine: Engine, pictures: PictureIntake, gate: Gate) -> None:
        self.pictures = pictures
        self._engine = engine
        self._gate = gate

    def name(self, given: str) -> str:
        """The id of the current call's request: the caller's, else one that nobody in flight has.

        Raises `InvalidField` when the caller's is malformed.
        """
        rpc = call.current()
        return rpc.adopt(given) if given else rpc.avoid(self._gate)

    @contextmanager
    def admit(self, request_id: str, caller: Caller, default_deadline: float) -> Iterator[Admitted]:
        """Be in flight for the length of the block.

        Raises `Draining`, `DuplicateRequest`, `DeadlineExceeded` or `DeadlineUnreachable`.
        """
        rpc = call.current()
        with self._gate.hold(rpc.scoped(request_id)) as admitted:
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
            admitted.deadline = rpc.deadline = time.monotonic() + left
            yield admitted

    def model(self, name: str) -> ModelInfo:
        """The model of this name, empty for the default one.

        Raises `EngineStarting` or `ModelNotFound`.
        """
        model = self._engine.model
        if model is None:
            raise EngineStarting("the model is loading")
        if name not in ("", model.name):
            raise ModelNotFound(f"this server serves {model.name}", resource=name)
        return model

    def check(self, request: core.Request, path: str = "") -> ModelInfo:
        """The model that will answer; `path` leads to the request's field `sampling`.

        Raises `EngineStarting`, `ModelNotFound` or `InvalidField`.
        """
        model = self.model(request.model)
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
        self, request: core.Request, picture: Picture, admitted: Admitted, caller: Caller
    ) -> Iterator[Stream]:
        """The running request; however the block or the caller ends, the engine forgets it.

        Nothing is awaited between staging, submitting and owning the stream, so no cancellation can
        come in between. Raises what `Engine.submit` raises. A picture that the engine cannot decode
        is told by the field it came in, which the engine does not know.
        """
        rpc = call.current()
        image = self.pictures.stage(picture)
        stream = self._engine.submit(
            msgspec.structs.replace(
                request,
                request_id=rpc.scoped(request.request_id),
                image=image,
                deadline=admitted.deadline,
                priority=rpc.priority,
                tenant=rpc.tenant,
            )
        )
        admitted.own(stream)
        # Also when the handler never gets to run its `finally`.
        caller.add_done_callback(lambda _: stream.abort())
        try:
            yield stream
        except ImageUndecodable as error:
            if isinstance(picture, NewPicture):
                error.metadata["field"] = picture.field
            raise
        finally:
            stream.abort()


async def follow(
    stream: Stream, deadline: float, silence: float | None = None
) -> AsyncGenerator[StreamReport | None]:
    """The reports up to `Done`; None after each `silence` seconds without one.

    Raises the request's own error, or `DeadlineExceeded` when the engine does not end it in time.
    """
    with closing(Patience()) as patience:
        report: StreamReport | None = None
        while not isinstance(report, Done):
            bound = deadline if silence is None else min(deadline, time.monotonic() + silence)
            try:
                with patience.until(bound):  # cut short, a read loses nothing
                    report = await stream.__anext__()
            except TimeoutError:
                if bound == deadline:
                    raise DeadlineExceeded("the deadline passed") from None
                report = None
            except StopAsyncIteration:
                raise InternalError("a stream ended without its result") from None
            _record(report)
            yield report


async def started(stream: Stream, deadline: float) -> Started:
    """The request's `Started`; what comes later is still to be followed."""
    async with aclosing(follow(stream, deadline)) as reports:
        async for report in reports:
            if isinstance(report, Started):
                return report
    raise InternalError("a request ended before it started")


async def outcome(stream: Stream, deadline: float) -> Done:
    """The request's `Done`; everything before it is repeated there. Raises as `follow` does."""
    with closing(Patience()) as patience:
        try:
            with patience.until(deadline):
                done = await stream.done()
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed") from None
    _record(done)
    return done


async def answer(stream: Stream, deadline: float) -> Done:
    """The `outcome` of a unary call's request; raises `Preempted` where an operator stopped it."""
    done = await outcome(stream, deadline)
    if done.finish_reason is core.FinishReason.CANCELLED:
        raise Preempted("an operator stopped the request")
    return done


def _record(report: StreamReport | None) -> None:
    """Tell the log line what the request cost; several requests of one RPC add up."""
    if isinstance(report, Done):
        rpc = call.current()
        rpc.timings = report.timings
        rpc.usage = report.usage if rpc.usage is None else call.total((rpc.usage, report.usage))
