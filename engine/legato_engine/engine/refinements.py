"""Outlines on their way to being better: drawn, refined on the device, and traced again."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import structlog

from legato_engine.core import FinishReason, Outline, Request, SegmentResult, SegmentTask
from legato_engine.ipc.messages import Done, EngineOutput, Failed
from legato_engine.models.capabilities import MaskRefiner
from legato_engine.models.frontend import PreparedImage
from legato_engine.scheduler.launch import Refinement

_log = structlog.get_logger()
_THREADS = 1
_SWITCH_SECONDS = 0.0005  # tracing is Python: for so long it may keep the thread of the ticks
_Future = concurrent.futures.Future[Any]


@dataclasses.dataclass(slots=True, eq=False)
class _Asked:
    """A request for outlines that runs."""

    image: PreparedImage
    deadline: float
    tenant: str


@dataclasses.dataclass(slots=True, eq=False)
class _Job:
    """A report held back while its outline is refined."""

    report: Done
    outline: Outline
    deadline: float
    tenant: str
    started: float
    future: _Future
    refinement: Refinement | None = None  # None until it is prepared


class Refinements:
    """Holds back the `Done` of an outline until it is refined, and passes on every other report.

    Its sequence has ended by then: it holds no page any more, only its picture. Whatever goes wrong
    with the refinement, or ends it early, is answered with the outline as the model said it.

    All methods belong to the engine's main thread; `wake` is called from another when one is ready,
    so that a sleeping loop calls `step`. Without a refiner every report is passed on.
    """

    def __init__(
        self,
        refiner: MaskRefiner | None,
        *,
        send: Callable[[EngineOutput], None],
        wake: Callable[[], None],
    ) -> None:
        self._refiner = refiner
        self._send = send
        self._wake = wake
        self._asked: dict[str, _Asked] = {}
        self._jobs: dict[str, _Job] = {}
        self._ready: collections.deque[tuple[str, _Future]] = collections.deque()
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "legato-outline")
        self.num_refined = 0
        self.num_kept = 0  # as they were, for a failure
        if refiner is not None:
            sys.setswitchinterval(_SWITCH_SECONDS)

    def __len__(self) -> int:
        """Reports held back."""
        return len(self._jobs)

    def __contains__(self, request_id: str) -> bool:
        """Whether this request's report is held back."""
        return request_id in self._jobs

    @property
    def tenants(self) -> Iterator[str]:
        """Whose outlines are being refined, one by one."""
        return (job.tenant for job in self._jobs.values())

    @property
    def ready(self) -> bool:
        """Whether something waits for `step`."""
        return bool(self._ready)

    @property
    def next_deadline(self) -> float:
        """When `step` is due even if nothing else happens, monotonic seconds."""
        return min((job.deadline for job in self._jobs.values()), default=math.inf)

    def expect(self, request: Request, image: PreparedImage | None) -> None:
        """This request is about to run."""
        if self._refiner is None or image is None or not isinstance(request.task, SegmentTask):
            return
        deadline = math.inf if request.deadline is None else request.deadline
        self._asked[request.request_id] = _Asked(image, deadline, request.tenant)

    def report(self, report: EngineOutput) -> None:
        """Pass a report on, or hold it back."""
        asked = None
        if isinstance(report, Done | Failed):
            asked = self._asked.pop(report.request_id, None)
        if asked is None or not isinstance(report, Done) or (outline := _refinable(report)) is None:
            self._send(report)
            return
        assert self._refiner is not None, "nothing is expected without a refiner"
        future = self._pool.submit(self._refiner.prepare, outline, asked.image)
        started = time.monotonic()
        self._jobs[report.request_id] = _Job(
            report, outline, asked.deadline, asked.tenant, started, future
        )
        self._watch(report.request_id, future)

    def abort(self, request_id: str) -> bool:
        """Forget a request; whether its report was held back, which now nobody gets."""
        self._asked.pop(request_id, None)
        job = self._jobs.pop(request_id, None)
        if job is None:
            return False
        job.future.cancel()
        return True

    def stop(self, request_id: str) -> None:
        """Answer now with the outline as it is; unknown ids are ignored."""
        job = self._jobs.get(request_id)
        if job is not None:
            self._answer(request_id, job, job.outline)

    def step(self, launch: Callable[[Refinement], None]) -> None:
        """Take on what the threads have done; `launch` runs a refinement on the device."""
        while self._ready:
            request_id, future = self._ready.popleft()
            job = self._jobs.get(request_id)
            if job is not None and job.future is future:  # else aborted or answered meanwhile
                self._advance(request_id, job, launch)
        now = time.monotonic()
        for request_id in [name for name, job in self._jobs.items() if job.deadline <= now]:
            self.stop(request_id)

    def close(self) -> None:
        """Stop the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _advance(self, request_id: str, job: _Job, launch: Callable[[Refinement], None]) -> None:
        if (failure := job.future.exception()) is not None:
            _log.warning("outline not refined", request_id=request_id, reason=repr(failure))
            self.num_kept += 1
            self._answer(request_id, job, job.outline)
        elif job.refinement is None:
            done = functools.partial(self._on_refined, request_id)  # no job, which holds it
            job.refinement = Refinement(job.future.result(), done)
            launch(job.refinement)
        else:
            self.num_refined += 1
            self._answer(request_id, job, job.future.result())

    def _on_refined(self, request_id: str, refinement: Refinement) -> None:
        """The device has answered."""
        job = self._jobs.get(request_id)
        if job is None or job.refinement is not refinement or self._refiner is None:
            return  # aborted or answered meanwhile
        job.future = self._pool.submit(
            self._refiner.finish, job.outline, refinement.given, refinement.answer
        )
        self._watch(request_id, job.future)

    def _watch(self, request_id: str, future: _Future) -> None:
        # Like the engine's own, this callback must not hold the future and its picture.
        future.add_done_callback(functools.partial(self._on_thread_done, request_id))

    def _on_thread_done(self, request_id: str, future: _Future) -> None:
        """Runs on the thread."""
        self._ready.append((request_id, future))
        self._wake()

    def _answer(self, request_id: str, job: _Job, outline: Outline) -> None:
        del self._jobs[request_id]
        job.future.cancel()  # what has not begun is not needed any more
        timings = job.report.timings
        total = timings.total + time.monotonic() - job.started
        self._send(
            msgspec.structs.replace(
                job.report,
                result=SegmentResult(segments=(outline,)),
                timings=msgspec.structs.replace(timings, total=total),
            )
        )


def _refinable(report: Done) -> Outline | None:
    """The one outline that has a path, of a request that was not cut short."""
    if report.finish_reason is FinishReason.CANCELLED:
        return None
    if not isinstance(report.result, SegmentResult) or len(report.result.segments) != 1:
        return None
    (outline,) = report.result.segments
    return outline if outline.path else None
