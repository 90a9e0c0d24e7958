"""Dispatch of requests: admit, submit, follow."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing

import msgspec
import structlog
from legato.v1 import task_pb2
from legato_engine.client.connection import EngineConnection
from legato_engine.client.request_stream import RequestStream, Restage, StreamOutput
from legato_engine.errors import (
    AdapterNotFound,
    AdapterUnusable,
    DeadlineExceeded,
    DeadlineUnreachable,
    EngineStarting,
    EngineUnavailable,
    ImageNotFound,
    ImageTooLarge,
    ImageUndecodable,
    InternalError,
    InvalidField,
    LegatoError,
    ModelNotFound,
    Overloaded,
    StoppedByOperator,
)
from legato_engine.ipc.messages import Done, PrefillStarted, ServedModel
from legato_engine.types import (
    CachedImageRef,
    FinishReason,
    QuerySpec,
    Request,
    RequestKey,
    TaskSpec,
)

from legato_service.convert import responses
from legato_service.engines.group import EngineGroup, Key, image_key
from legato_service.errors import failure
from legato_service.images.intake import (
    BlobImage,
    CheckedImage,
    HeldUploads,
    ImageIntake,
    InlineImage,
    NewImage,
    stage_all,
)
from legato_service.requests.registry import ActiveRequest, RequestRegistry
from legato_service.rpc import call
from legato_service.rpc.reusable_timeout import ReusableTimeout

PREFIX = 256
"""Minimum characters of a common prefix to route by it."""

_PART = 512  # bytes of an image, of its beginning, middle and end


def bytes_key(tenant: str, data: bytes | memoryview) -> Key:
    """Return a key that is equal for equal images; hashing all bytes would cost more."""
    middle = len(data) // 2
    parts = (data[:_PART], data[middle : middle + _PART], data[-_PART:])
    return "bytes", tenant, len(data), hash(tuple(map(bytes, parts)))


def keys_of(request: Request, image: CheckedImage) -> Iterator[Key]:
    """Yield cache keys by value: image or prefix, other parts of the call or session, adapter."""
    tenant = request.tenant
    match image:
        case CachedImageRef():
            yield image_key(tenant, image.image_id)
        case InlineImage() if request.cache_image:
            yield bytes_key(tenant, image.data)
        case BlobImage() if request.cache_image:
            yield bytes_key(tenant, image.writer.view())
        case None if len(prefix := _prefix(request.task)) == PREFIX:
            yield "prefix", tenant, request.adapter, hash(prefix)
    if request.request_id.part:
        yield "call", tenant, request.request_id.caller_id
    if request.adapter:
        yield "adapter", request.adapter


def _prefix(task: TaskSpec) -> str:
    """Return the beginning of a prompt without an image."""
    if not isinstance(task, QuerySpec):
        return ""
    first = task.history[0].question if task.history else task.question
    return f"{task.system}\n{first}"[:PREFIX]


# ---------------------------------------------------------------- dispatcher


class Dispatcher:
    """Dispatcher of all RPCs' requests to the engines."""

    def __init__(
        self,
        engines: EngineGroup,
        images: ImageIntake,
        registry: RequestRegistry,
        held: HeldUploads,
    ) -> None:
        self.images = images
        self._held = held
        self._engines = engines
        self._registry = registry

    def key(self, given: str) -> RequestKey:
        """Return a key with the client's id, or a free one.

        Raises:
            InvalidField: the client's id is malformed.
        """
        rpc = call.current()
        return rpc.adopt(given) if given else rpc.avoid(self._registry)

    def admit(
        self,
        key: RequestKey,
        time_left: float | None,
        default_deadline: float,
        *,
        resumes: bool = False,
    ) -> ActiveRequest:
        """Return the request, in flight for the length of its `with` block.

        `time_left` is None for a call without a deadline. When the request `resumes`, a Generate of
        its id ends, unless this raises.

        Raises:
            Draining: the server is shutting down.
            RequestIdInUse: a request with this id is in flight.
            DeadlineExceeded: the deadline passed already.
            DeadlineUnreachable: the estimated wait is longer than the time left.
        """
        rpc = call.current()
        self._registry.check(key, resumes=resumes)
        left = default_deadline if time_left is None else time_left
        wait = self._engines.estimated_wait
        if left <= 0:
            raise DeadlineExceeded("the deadline passed before the request began")
        if wait > left and self._engines.serving and _is_queued_last(rpc):
            raise DeadlineUnreachable(
                f"a request arriving now would wait {wait:.3g} s",
                estimated_wait_ms=round(wait * 1000),
                time_left_ms=round(left * 1000),
            )
        rpc.estimated_wait = wait
        rpc.deadline = deadline = time.monotonic() + left
        return self._registry.enter(key, deadline)

    def model(self, name: str, adapter: str = "") -> ServedModel:
        """Return the model of this name, empty for the default one.

        Only the engine knows whether a particular adapter exists.

        Raises:
            EngineStarting: the model is loading.
            ModelNotFound: this server serves another model.
            AdapterNotFound: this server has no adapters.
        """
        model = self._engines.model
        if model is None:
            raise EngineStarting("the model is loading")
        if name not in ("", model.name):
            raise ModelNotFound(f"this server serves {model.name}", resource=name)
        if adapter and not model.adapters:
            raise AdapterNotFound("this server holds no adapters", resource=adapter)
        return model

    def check(self, request: Request, path: str = "", num_images: int = 0) -> ServedModel:
        """Return the model that serves the request; `path` leads to the field `sampling`.

        Raises:
            InvalidField: more tokens are requested, or more images given, than the model takes.
            LegatoError: as `model` raises.
        """
        model = self.model(request.model, request.adapter)
        max_tokens = request.sampling.max_tokens
        if max_tokens is not None and max_tokens > model.max_output_tokens:
            raise InvalidField(
                f"at most {model.max_output_tokens}",
                field=f"{path}sampling.max_tokens",
                limit=model.max_output_tokens,
                actual=max_tokens,
            )
        if num_images > max(model.max_images, 1):  # an engine without images refuses one itself
            raise InvalidField(
                f"{model.name} takes at most {max(model.max_images, 1)} of {num_images}",
                field=f"{path}query.images" if path else "images",
                limit=model.max_images,
                actual=num_images,
            )
        return model

    def submit(
        self,
        request: Request,
        images: Sequence[CheckedImage],
        active: ActiveRequest,
        *,
        originals: Sequence[CheckedImage] = (),
        may_wait: bool = False,
    ) -> RequestStream:
        """Submit the request, or one task of it; `active` owns the stream.

        `originals` have the bytes of `images` that are named by their ids. With `may_wait`, because
        the call has already started, the request waits for an engine.

        Nothing is awaited here, so no cancellation interrupts it. `active` ends with its asyncio
        task at the latest. A callback on the RPC's context would form a reference cycle, and keep
        all that the call held until a garbage collection.

        Raises:
            LegatoError: as `EngineConnection.submit` raises.
        """
        rpc = call.current()
        if rpc.gate_slot is not None:
            rpc.gate_slot.mark_submitted()
        given = [each for each in images if each is not None]
        request = msgspec.structs.replace(request, deadline=active.deadline, priority=rpc.priority)
        if not given:
            stream = self._engine_for(request, None, True).submit(request, may_wait=may_wait)
            active.own(stream)
            return stream
        bytes_of = {
            index: each
            for index, each in enumerate(originals or given)
            if isinstance(each, NewImage)
        }
        restage = self._restage(request.tenant, given, bytes_of)
        sought = next((each for index, each in enumerate(given) if index not in bytes_of), None)
        engine = self._engine_for(request, sought or given[0], not sought)
        request = request.with_images(stage_all(given, engine.blobs, {}))
        stream = engine.submit(request, restage, may_wait=may_wait)
        field = next((each.field for each in given if isinstance(each, NewImage)), "")
        if field and len(given) > 1:
            field = "images"
        active.own(stream, field)
        return stream

    def _restage(
        self,
        tenant: str,
        images: Sequence[NewImage | CachedImageRef],
        bytes_of: Mapping[int, NewImage],
    ) -> Restage | None:
        """Return a function that stages the images again; None without bytes of any."""
        held = {
            index: restage
            for index, image in enumerate(images)
            if isinstance(image, CachedImageRef) and index not in bytes_of
            if (restage := self._held.restage(tenant, image.image_id)) is not None
        }
        if not (bytes_of or held):
            return None

        again = [bytes_of.get(index, image) for index, image in enumerate(images)]
        return lambda blobs: stage_all(again, blobs, held)

    def _engine_for(
        self, request: Request, image: CheckedImage, has_bytes: bool
    ) -> EngineConnection:
        if len(self._engines.members) == 1:
            return self._engines.members[0]
        return self._engines.route(tuple(keys_of(request, image)), has_bytes=has_bytes)


def _is_queued_last(rpc: call.Call) -> bool:
    """Return whether the request is queued last, so that the estimated wait applies to it.

    It does not apply to higher priorities, nor to tenants below their share.
    """
    return rpc.priority <= 0 and (rpc.gate_slot is None or rpc.gate_slot.is_over_share)


async def follow(
    stream: RequestStream, silence: float = math.inf
) -> AsyncGenerator[StreamOutput | None]:
    """Yield the outputs up to `Done`, and None after each `silence` seconds without one.

    Raises:
        LegatoError: the request failed.
    """
    with closing(ReusableTimeout()) as bound:
        read: Callable[[], Awaitable[StreamOutput | None]]
        if silence == math.inf:
            read = stream.__anext__
        else:
            read = functools.partial(_next_within, stream, bound, silence)
        output: StreamOutput | None = None
        while not isinstance(output, Done):
            try:
                output = await read()
            except StopAsyncIteration:
                raise InternalError("a stream ended without its result") from None
            if isinstance(output, Done):
                _record(output)
            yield output


async def _next_within(
    stream: RequestStream, bound: ReusableTimeout, silence: float
) -> StreamOutput | None:
    """Return the next output within the timeout; a timed-out read loses nothing."""
    try:
        with bound.until(time.monotonic() + silence):
            return await stream.__anext__()
    except TimeoutError:
        return None


async def started(stream: RequestStream) -> PrefillStarted:
    """Wait for `PrefillStarted`; later outputs stay in the stream."""
    async with aclosing(follow(stream)) as outputs:
        async for output in outputs:
            if isinstance(output, PrefillStarted):
                return output
    raise InternalError("a request ended before it started")


def completed(done: Done) -> Done:
    """Record the costs of a unary call's request.

    Raises:
        StoppedByOperator: an operator stopped the request.
    """
    _record(done)
    if done.finish_reason is FinishReason.CANCELLED:
        raise StoppedByOperator("an operator stopped the request")
    return done


def _record(done: Done) -> None:
    """Add the costs to the RPC, which may have several requests."""
    rpc = call.current()
    rpc.timings = done.timings
    rpc.resumptions += done.resumptions
    if rpc.on_done is not None:
        rpc.on_done(rpc, done)
    rpc.usage = done.usage if rpc.usage is None else call.total((rpc.usage, done.usage))


# ---------------------------------------------------------------- shared image

log = structlog.get_logger("legato.rpc")

SHARED_FAILURES = (
    AdapterNotFound,
    AdapterUnusable,
    Overloaded,
    DeadlineExceeded,
    ImageNotFound,
    ImageTooLarge,
    ImageUndecodable,
    StoppedByOperator,
    EngineUnavailable,
)
"""Errors of server, image or adapter, which fail all tasks; any other fails its own task only."""


def cached_image(started: PrefillStarted) -> CachedImageRef | None:
    """Return a reference to the image whose bytes the first started task carries."""
    image = started.image
    return CachedImageRef(image_id=image.image_id) if image and image.image_id else None


def task_result(task_id: str, outcome: Done | LegatoError, request_id: str) -> task_pb2.TaskResult:
    """Build a task's result; the text of an internal error is only logged."""
    if isinstance(outcome, Done):
        return responses.task_result(task_id, outcome)
    if isinstance(outcome, InternalError):
        log.error("internal_error", request_id=request_id, exc_info=outcome)
    return task_pb2.TaskResult(task_id=task_id, error=failure(outcome, request_id).status)
