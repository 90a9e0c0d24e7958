"""The engine without its process: commands in, outputs out."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import time
from collections import abc

import msgspec
import structlog

from legato_engine.core.adapters import AdapterStore
from legato_engine.core.leases import LeaseHandler
from legato_engine.core.output import OutputSink
from legato_engine.core.preprocessor import Lazy, PendingImage, PreprocessedImage, Preprocessor
from legato_engine.core.refinements import Refinements
from legato_engine.core.requests import (
    PendingLease,
    PendingRefinement,
    PendingRequest,
    RequestStage,
    RequestTable,
    ScheduledRequest,
    finish_reason_of,
    make_sequence,
    replay,
)
from legato_engine.errors import (
    AdapterNotFound,
    DeadlineExceeded,
    InternalError,
    InvalidField,
    LegatoError,
    ModelNotFound,
    TaskUnsupported,
    exhaustion,
)
from legato_engine.ipc.messages import DropImage, HoldImage, ImageTotals, SchedulerLoad
from legato_engine.models.frontend import ModelFrontend
from legato_engine.scheduler.scheduler import Scheduler
from legato_engine.sequence import Sequence, Task
from legato_engine.types import CachedImageRef, QuerySpec, Request, RequestKey, TokenInfo

_log = structlog.get_logger()

_MAX_INLINE_CHARACTERS = 16 * 1024  # about 10 ms of tokenisation


@dataclasses.dataclass(eq=False)
class EngineCore:
    """Engine without a process: prepares images, builds sequences, drives the scheduler.

    Belongs to one thread. The scheduler enforces the deadlines of its sequences.
    """

    frontend: ModelFrontend
    scheduler: Scheduler
    requests: RequestTable
    preprocessor: Preprocessor
    leases: LeaseHandler
    adapters: AdapterStore | None
    refinements: Refinements
    sink: OutputSink

    def __post_init__(self) -> None:
        self._unannounced: list[Sequence] = []
        self._seq_ids = itertools.count()
        self._texts = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="legato-text")

    # ------------------------------------------------------------ commands

    def submit(self, request: Request) -> None:
        """Start a request; an error becomes its `Failed` output."""
        resumed = request.resumed
        arrival = time.monotonic() if resumed is None else resumed.arrival
        try:
            self._check(request)
            pending = self._prepare(request, arrival)
        except Exception as error:  # noqa: BLE001 - one request's failure is its own
            self._fail(request.request_id, error)
            return
        if pending.futures:
            self.requests.add(pending)
        elif pending.awaits_images:  # they were prepared at once
            self.requests.add(pending)
            self._place_images(pending)
        else:
            self._schedule(pending)

    def abort(self, request_id: RequestKey) -> None:
        request = self.requests.remove(request_id)
        if request is not None:
            request.cancel()
            self.scheduler.abort(request_id)

    def stop(self, request_id: RequestKey) -> None:
        """End a request now with its partial result; ignore leases."""
        match self.requests.get(request_id):
            case PendingRequest() as request:
                self.requests.remove(request_id)
                request.cancel()
                self._schedule(dataclasses.replace(request, images=(), adapter=None))
                self.scheduler.stop(request_id)
            case ScheduledRequest():
                self.scheduler.stop(request_id)
            case PendingRefinement() as request:
                self.refinements.finish_unrefined(request)

    def hold(self, command: HoldImage) -> None:
        try:
            if not self.frontend.max_images:
                raise TaskUnsupported("this model takes no images", task="image")
            self._make_room(command.request_id, command.owner)
            self.requests.add(self.leases.start(command))
        except Exception as error:  # noqa: BLE001 - one caller's failure is its own
            self.leases.fail(command.request_id, error)

    def drop(self, command: DropImage) -> None:
        self.leases.drop(command)

    def set_pipeline_depth(self, depth: int) -> None:
        self.scheduler.set_depth(depth)

    # ------------------------------------------------------------ state

    @property
    def busy(self) -> bool:
        return self.requests.has_completed or not self.scheduler.idle

    @property
    def idle(self) -> bool:
        """Return whether nothing is being prepared, scheduled or run."""
        return not len(self.requests) and self.scheduler.idle

    @property
    def steps_committed(self) -> int:
        return self.scheduler.steps_committed

    def load(self) -> SchedulerLoad:
        load, preparing = self.scheduler.load(), self.requests.count(PendingRequest)
        return msgspec.structs.replace(
            load,
            running=load.running + self.requests.count(PendingRefinement),
            waiting=load.waiting + preparing,
            preparing=preparing,
            images_cached=self.preprocessor.images_cached,
        )

    def image_totals(self) -> ImageTotals:
        return msgspec.structs.replace(
            self.preprocessor.totals, held_bytes=self.leases.table.num_bytes
        )

    def estimated_wait(self) -> float:
        return self.scheduler.admission.estimated_wait()

    def next_deadline(self) -> float:
        """Return the latest time of the next `step`, in monotonic seconds."""
        return min(self.requests.next_deadline, self.leases.table.next_expiry)

    # ------------------------------------------------------------ the step

    def step(self) -> bool:
        """Advance requests and the scheduler; return whether the device got work."""
        self.leases.table.expire()
        for request in self.requests.completed():
            self._advance(request)
        for request in self.requests.expired(time.monotonic()):
            self._expire(request)
        worked = self.scheduler.step()
        self._announce_queued()
        return worked

    def close(self) -> None:
        self.preprocessor.close()
        self._texts.shutdown(wait=False, cancel_futures=True)
        self.refinements.close()
        if self.adapters is not None:
            self.adapters.close()

    def _advance(self, request: RequestStage) -> None:
        match request:
            case PendingRequest():
                self._admit(request)
            case PendingLease():
                self.requests.remove(request.request_id)
                self.leases.finish(request)
            case PendingRefinement():
                self.refinements.advance(request, self.scheduler.refine)

    def _expire(self, request: RequestStage) -> None:
        match request:
            case PendingRequest():
                self.requests.remove(request.request_id)
                request.cancel()
                self._fail(request.request_id, DeadlineExceeded("the deadline passed"))
            case PendingRefinement():
                self.refinements.finish_unrefined(request)

    def _announce_queued(self) -> None:
        if not self._unannounced:
            return
        waiting = [s for s in self._unannounced if s.is_waiting]
        self._unannounced.clear()
        for sequence in waiting:
            position = self.scheduler.queue.position(sequence)
            self.sink.queued(sequence, position, self.estimated_wait())

    # ------------------------------------------------------------ from a command to a sequence

    def _check(self, request: Request) -> None:
        if request.model not in ("", self.frontend.name):
            raise ModelNotFound(f"this engine serves {self.frontend.name}", resource=request.model)
        if request.adapter and self.adapters is None:
            raise AdapterNotFound("this engine holds no adapters", resource=request.adapter)
        most = max(self.frontend.max_images, 1)  # a text model has an error of its own
        if len(request.images) > most:
            raise InvalidField(
                f"this model takes at most {most} of {len(request.images)}",
                field="images",
                limit=most,
                actual=len(request.images),
            )
        if not request.was_admitted:
            self._make_room(request.request_id, request.tenant, request.priority)

    def _make_room(self, request_id: RequestKey, tenant: str, priority: int = 0) -> None:
        """Make room in a full queue by ending another request, or raise."""
        if request_id in self.requests:
            raise InvalidField("request id is in use", field="request_id")
        preparing = self.requests.queued_tenants()
        displaced = self.scheduler.make_room_for(tenant, priority, time.monotonic(), preparing)
        if displaced is None:
            return
        pending = self.requests.newest(PendingRequest, displaced)
        error = self.scheduler.admission.displaced_error()
        if pending is None:  # only image leases
            raise error
        self.requests.remove(pending.request_id)
        pending.cancel()
        self._fail(pending.request_id, error)

    def _prepare(self, request: Request, arrival: float) -> PendingRequest:
        adapters = self.adapters
        adapter = adapters.start(request.adapter) if adapters and request.adapter else None
        task = Lazy(functools.partial(self.frontend.make_task, request))
        places_images = self.frontend.places_images and request.image is not None
        images = self._start_images(request, None if places_images else task)
        return PendingRequest(
            request_id=request.request_id,
            tenant=request.tenant,
            deadline=request.ends_by,
            request=request,
            arrival=arrival,
            task=task,
            text=None if places_images else self._start_text(request, task, images),
            images=images,
            adapter=adapter,
            awaits_images=places_images,
        )

    def _start_text(
        self, request: Request, task: Lazy[Task], images: abc.Sequence[PendingImage]
    ) -> concurrent.futures.Future[Task] | None:
        """Tokenise a short text on this thread, which is faster than waking another thread.

        Compiling a grammar may take tens of milliseconds.
        """
        asked = request.task
        is_long = isinstance(asked, QuerySpec) and (
            asked.num_characters > _MAX_INLINE_CHARACTERS or asked.response_format is not None
        )
        if is_long:
            return self._texts.submit(task.get)
        try:
            task.get()
        except BaseException:
            for image in images:
                if isinstance(image, concurrent.futures.Future):
                    image.cancel()
            raise
        return None

    def _start_images(
        self, request: Request, prefetch: Lazy[Task] | None
    ) -> abc.Sequence[PendingImage]:
        """Start to prepare the images.

        If the scheduler is idle, hash on this thread and, if no request is pending, decode a single
        image, too, which hides `prefetch`.
        """
        if not self.frontend.max_images:
            return ()
        self.leases.table.expire()
        idle, places_images = self.scheduler.idle, self.frontend.places_images
        find = functools.partial(
            self.preprocessor.find, tenant=request.tenant, may_hash=idle, loads=places_images
        )
        found = [find(source) for source in request.images]
        if places_images:
            sizes = [each.size for each in found if each is not None]
            self.frontend.check_images(request.task, sizes)
            self.preprocessor.check_pixels(found)
        start = functools.partial(
            self.preprocessor.start,
            tenant=request.tenant,
            keep=request.cache_image,
            inline=idle and len(found) == 1 and not self.requests.count(PendingRequest),
            prefetch=prefetch,
        )
        images: list[PendingImage] = []
        for source, each in zip(request.images, found, strict=True):
            if isinstance(each, PreprocessedImage):
                images.append(each)
            else:
                assert not isinstance(source, CachedImageRef), (
                    "`find` returns a named image or raises"
                )
                images.append(start(source, each))
        return images

    def _admit(self, pending: PendingRequest) -> None:
        failure = pending.failure
        if failure is None and not pending.is_ready:
            return
        if failure is None and pending.awaits_images:
            self._place_images(pending)
            return
        self.requests.remove(pending.request_id)
        if failure is None:
            self._schedule(pending)
            return
        pending.cancel()
        # Not raised: a traceback would keep the image alive.
        self._fail(pending.request_id, failure)

    def _place_images(self, pending: PendingRequest) -> None:
        """Make the prompt around the prepared images, on the thread for long texts."""
        images = [each.image for each in pending.prepared_images]
        pending.task = Lazy(functools.partial(self.frontend.make_task, pending.request, images))
        pending.text, pending.awaits_images = self._texts.submit(pending.task.get), False
        self.requests.watch(pending)

    def _schedule(self, pending: PendingRequest) -> None:
        try:
            self._submit_sequence(pending)
        except Exception as error:  # noqa: BLE001 - one request's failure is its own
            self._fail(pending.request_id, error)

    def _submit_sequence(self, pending: PendingRequest) -> None:
        request, preprocessed = pending.request, pending.prepared_images
        images = [each.image for each in preprocessed]
        prefix = images[0] if images and not self.frontend.places_images else None
        adapter = None if pending.adapter is None else pending.adapter.result()
        sequence = make_sequence(self.frontend, request, prefix, adapter, task=pending.task.get())
        sequence.seq_id = next(self._seq_ids)
        sequence.timing.arrival = pending.arrival
        tokens: list[TokenInfo] = []
        if request.resumed is not None:
            tokens = replay(sequence, request.resumed, self.frontend)
        finish_reason = finish_reason_of(sequence)
        if finish_reason is None:
            self.scheduler.submit(sequence)
        self.requests.add(
            ScheduledRequest(
                request_id=pending.request_id,
                tenant=pending.tenant,
                request=request,
                images=tuple([image.info for image in images]),
                image_seconds=max((each.seconds for each in preprocessed), default=0.0),
                tokens=tokens,
                num_sent_tokens=sequence.num_committed,
                image_to_refine=self.refinements.image_to_refine(request, prefix),
            )
        )
        if finish_reason is None:
            self._unannounced.append(sequence)
        else:  # only its result was lost
            if not request.was_admitted:
                self.sink.started(sequence)
            self.sink.done(sequence, finish_reason)

    def _fail(self, request_id: RequestKey, error: BaseException) -> None:
        if not isinstance(error, LegatoError):
            _log.error("request_failed", request_id=request_id.name, exc_info=error)
            error = exhaustion(error) or InternalError("the request could not be prepared")
        self.sink.fail(request_id, error)
