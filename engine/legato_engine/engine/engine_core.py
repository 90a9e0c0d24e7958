"""Requests in, reports out: the engine without its process."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable

import msgspec
import structlog

from legato_engine.core import CachedImage, Request
from legato_engine.engine.adapter_store import AdapterStore
from legato_engine.engine.once import Once
from legato_engine.engine.output_sink import OutputSink, Ticket
from legato_engine.engine.pending_leases import PendingLeases
from legato_engine.engine.pending_request import PendingRequest, Preparation
from legato_engine.engine.preprocessor import Picture, Preprocessor
from legato_engine.engine.refinements import Refinements
from legato_engine.errors import (
    AdapterNotFound,
    DeadlineExceeded,
    InternalError,
    InvalidField,
    LegatoError,
    ModelNotFound,
    TaskUnsupported,
)
from legato_engine.ipc.messages import DropImage, HoldImage, Load
from legato_engine.models.capabilities import Adapter
from legato_engine.models.frontend import ModelFrontend, PreparedImage
from legato_engine.scheduler.scheduler import Scheduler, deadline_of
from legato_engine.sequence import Sequence, SequenceStatus
from legato_engine.tasks import Task

_log = structlog.get_logger()


class EngineCore:
    """Prepares pictures and adapters, builds sequences and drives the scheduler.

    Single-threaded: all methods belong to the thread that calls `step`. `wake` is called from other
    threads when one is ready, so that a sleeping loop calls `step`.
    """

    def __init__(
        self,
        frontend: ModelFrontend,
        scheduler: Scheduler,
        preprocessor: Preprocessor,
        image_jobs: PendingLeases,
        adapters: AdapterStore | None,
        refinements: Refinements,
        sink: OutputSink,
        *,
        wake: Callable[[], None],
    ) -> None:
        self._frontend = frontend
        self._scheduler = scheduler
        self._preprocessor = preprocessor
        self._image_jobs = image_jobs
        self._adapters = adapters
        self._refinements = refinements
        self._sink = sink
        self._wake = wake
        self._jobs: dict[str, PendingRequest] = {}
        self._prepared: collections.deque[tuple[str, Preparation]] = collections.deque()
        self._fresh: list[Sequence] = []
        self._seq_ids = itertools.count()

    # ------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        """Begin a request; whatever is wrong with it becomes its `Failed` report."""
        arrival = time.monotonic()
        try:
            self._check(request)
            self._prepare(request, arrival)
        except Exception as error:  # noqa: BLE001 - one request's failure is its own
            self._fail(request, error)

    def abort(self, request_id: str) -> None:
        """Forget a request in whatever state it is; unknown ids are ignored."""
        job = self._jobs.pop(request_id, None)
        if job is not None:
            job.cancel()
            return
        if self._image_jobs.abort(request_id) or self._refinements.abort(request_id):
            return
        self._sink.forget(request_id)
        self._scheduler.abort(request_id)

    def stop(self, request_id: str) -> None:
        """End a request now with what it has, in whatever state it is; unknown ids are ignored."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            self._refinements.stop(request_id)
            self._scheduler.stop(request_id)
            return
        job.cancel()
        try:
            self._enqueue(dataclasses.replace(job, picture=None, adapter=None))
        except Exception as error:  # noqa: BLE001 - one request's failure is its own
            self._fail(job.request, error)
        else:
            self._scheduler.stop(request_id)

    def hold(self, command: HoldImage) -> None:
        """Begin to hold a picture; how that ends is told by one report."""
        try:
            if not self._frontend.takes_images:
                raise TaskUnsupported("this model takes no pictures", task="image")
            self._check_queue(command.owner)
            self._image_jobs.hold(command)
        except Exception as error:  # noqa: BLE001 - one caller's failure is its own
            self._image_jobs.fail(command.request_id, error)

    def drop(self, command: DropImage) -> None:
        """Hold a picture no longer, which is told by one report."""
        self._image_jobs.drop(command)

    # ------------------------------------------------------------ state

    @property
    def busy(self) -> bool:
        """Whether `step` has something to run now."""
        ready = self._prepared or self._image_jobs.ready or self._refinements.ready
        return bool(ready) or not self._scheduler.idle

    @property
    def steps_committed(self) -> int:
        """Launches committed since the start."""
        return self._scheduler.steps_committed

    def load(self) -> Load:
        """What is held right now; requests whose picture is being prepared count as waiting, those
        whose outline is being refined as running.
        """
        load = self._scheduler.load()
        return msgspec.structs.replace(
            load,
            running=load.running + len(self._refinements),
            waiting=load.waiting + len(self._jobs),
            images_cached=self._preprocessor.images_cached,
        )

    def estimated_wait(self) -> float:
        """Seconds a request arriving now would wait."""
        return self._scheduler.estimated_wait()

    def next_deadline(self) -> float:
        """Monotonic time by which `step` must be called even if nothing wakes the loop."""
        deadlines = (deadline_of(job.request) for job in self._jobs.values())
        expiries = (self._image_jobs.next_expiry, self._refinements.next_deadline)
        return min(*expiries, *deadlines, math.inf)

    # ------------------------------------------------------------ the tick

    def step(self) -> bool:
        """Admit prepared pictures, expire, run one scheduler tick; whether it did device work."""
        while self._prepared:
            self._admit(*self._prepared.popleft())
        self._image_jobs.step()
        self._refinements.step(self._scheduler.refine)
        self._expire()
        worked = self._scheduler.step()
        self._announce_queued()
        return worked

    def close(self) -> None:
        """Stop the threads that prepare."""
        self._preprocessor.close()
        self._refinements.close()
        if self._adapters is not None:
            self._adapters.close()

    def _check(self, request: Request) -> None:
        if request.model not in ("", self._frontend.name):
            raise ModelNotFound(f"this engine serves {self._frontend.name}", resource=request.model)
        if request.request_id in self._refinements:
            raise InvalidField("request id is in use", field="request_id")
        if request.adapter and self._adapters is None:
            raise AdapterNotFound("this engine holds no adapters", resource=request.adapter)
        self._check_queue(request.tenant)

    def _check_queue(self, tenant: str) -> None:
        """Pictures that are only to be held take the same threads, outlines one more: all count."""
        preparing = [job.request.tenant for job in self._jobs.values()]
        others = (*self._image_jobs.owners, *self._refinements.tenants)
        self._scheduler.check_queue(tenant, [*preparing, *others])

    def _prepare(self, request: Request, arrival: float) -> None:
        """Enqueue a request that has all it needs; else as soon as threads have prepared it."""
        adapters = self._adapters
        adapter = adapters.start(request.adapter) if adapters and request.adapter else None
        # Made beside the picture, wherever that is prepared, so that nobody waits for it later.
        task = Once(functools.partial(self._frontend.make_task, request))
        picture = self._picture(request, task)
        job = PendingRequest(request, arrival, _made(task, picture), picture, adapter)
        if not job.futures:
            self._enqueue(job)
            return
        self._jobs[request.request_id] = job
        for future in job.futures:
            # The callback must not hold the future: its picture would live until the next full
            # garbage collection, which a process of long-lived objects hardly ever runs.
            future.add_done_callback(functools.partial(self._on_prepared, request.request_id))

    def _picture(
        self, request: Request, task: Once[Task]
    ) -> Picture | concurrent.futures.Future[Picture] | None:
        """The request's picture when it is known, any other is prepared on a thread.

        With nothing to run nobody waits for this thread, and it may hash the bytes itself; with
        nobody else's picture under way, it may even decode them.
        """
        source = request.image
        if source is None or not self._frontend.takes_images:
            return None
        self._image_jobs.expire()
        idle = self._scheduler.idle
        found = self._preprocessor.find(source, look_inside=idle)
        if isinstance(found, Picture):
            return found
        assert not isinstance(source, CachedImage), "a picture that is named is found or missing"
        here = idle and not self._jobs
        return self._preprocessor.start(
            source, found, keep=request.cache_image, here=here, beside=task
        )

    def _on_prepared(self, request_id: str, future: Preparation) -> None:
        """Runs on a thread that prepares, or on this one when the job was cancelled."""
        self._prepared.append((request_id, future))
        self._wake()

    def _admit(self, request_id: str, future: Preparation) -> None:
        job = self._jobs.get(request_id)
        if job is None or future not in job.futures:
            return  # aborted or expired meanwhile, or already admitted
        failure = job.failure
        if failure is None and not job.done:
            return
        del self._jobs[request_id]
        if failure is not None:  # not raised: its traceback would hold the job's picture
            job.cancel()
            self._fail(job.request, failure)
            return
        try:
            self._enqueue(job)
        except Exception as error:  # noqa: BLE001 - one request's failure is its own
            self._fail(job.request, error)

    def _enqueue(self, job: PendingRequest) -> None:
        picture = job.prepared_picture
        image = picture.image if picture else None
        sequence = make_sequence(
            self._frontend, job.request, image, job.prepared_adapter, task=job.task
        )
        sequence.seq_id = next(self._seq_ids)
        sequence.arrival = job.arrival
        self._scheduler.submit(sequence)
        ticket = Ticket(image.info, picture.seconds) if image and picture else Ticket()
        self._sink.expect(job.request.request_id, ticket)
        self._refinements.expect(job.request, image)
        self._fresh.append(sequence)

    def _fail(self, request: Request, error: BaseException) -> None:
        if not isinstance(error, LegatoError):
            _log.error("request failed", request_id=request.request_id, exc_info=error)
            error = InternalError("the request could not be prepared")
        self._sink.fail(request.request_id, error)

    def _expire(self) -> None:
        """Deadlines of requests that the scheduler does not know yet."""
        now = time.monotonic()
        expired = [job for job in self._jobs.values() if deadline_of(job.request) <= now]
        for job in expired:
            del self._jobs[job.request.request_id]
            job.cancel()
            self._sink.fail(job.request.request_id, DeadlineExceeded("the deadline passed"))

    def _announce_queued(self) -> None:
        """Whoever did not start in its first tick has to wait, and is told so once."""
        if not self._fresh:
            return
        waiting = [s for s in self._fresh if s.status is SequenceStatus.WAITING]
        self._fresh.clear()
        for sequence in waiting:
            position = self._scheduler.position(sequence)
            self._sink.queued(sequence, position, self.estimated_wait())


def _made(task: Once[Task], picture: Picture | concurrent.futures.Future[Picture] | None) -> Task:
    """The task; a picture that was started for one that cannot be made is given up."""
    try:
        return task.get()
    except BaseException:
        if isinstance(picture, concurrent.futures.Future):
            picture.cancel()
        raise


def make_sequence(
    frontend: ModelFrontend,
    request: Request,
    image: PreparedImage | None,
    adapter: Adapter | None = None,
    *,
    task: Task | None = None,
) -> Sequence:
    """A waiting sequence; it shares nothing where the request forbids to keep its image.

    An adapter changes what the prefix's positions hold, so the prefix is shared under it alone.
    Without its `task` that is made here, and raises what `ModelFrontend.make_task` raises.
    """
    task = task or frontend.make_task(request)
    return Sequence(
        seq_id=0,
        request=request,
        task=task,
        prefix_key=(image.key if image else "") if request.cache_image else None,
        prefix_length=frontend.prefix_length(image is not None),
        prompt=task.prompt,
        pixels=image,
        num_crops=image.num_crops if image else 0,
        adapter=adapter,
        adapter_key=adapter.key if adapter else "",
        adapter_rank=adapter.rank if adapter else 0,
    )
