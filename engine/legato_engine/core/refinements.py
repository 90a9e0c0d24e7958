"""Refinement of outlines."""

from __future__ import annotations

import concurrent.futures
import functools
import sys
import time
from collections.abc import Callable

import msgspec
import structlog

from legato_engine.core.requests import PendingRefinement, RequestTable, ScheduledRequest
from legato_engine.ipc.messages import Done, EngineOutput
from legato_engine.models.base import MaskRefiner
from legato_engine.models.frontend import PreparedImage
from legato_engine.scheduler.batch import Refinement
from legato_engine.types import (
    FinishReason,
    MaskOutline,
    Request,
    RequestKey,
    SegmentOutput,
    SegmentSpec,
)

_log = structlog.get_logger()
_THREADS = 1
_SWITCH_SECONDS = 0.0005  # tracing is Python code that may hold the GIL for this long before a step


class Refinements:
    """Refinements of outlines; each holds back a `Done` until its outline is refined.

    If that fails or the deadline passes, the result is the model's own outline. Belongs to the
    engine's main thread.
    """

    def __init__(
        self,
        refiner: MaskRefiner | None,
        requests: RequestTable,
        *,
        send: Callable[[EngineOutput], None],
    ) -> None:
        self._refiner = refiner
        self._requests = requests
        self._send = send
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "legato-outline")
        self.num_refined = 0
        self.num_unrefined = 0
        if refiner is not None:
            sys.setswitchinterval(_SWITCH_SECONDS)

    def image_to_refine(
        self, request: Request, image: PreparedImage | None
    ) -> PreparedImage | None:
        if self._refiner is None or not isinstance(request.task, SegmentSpec):
            return None
        return image

    def finish(self, request: ScheduledRequest, done: Done) -> None:
        outline = _single_outline(done)
        if self._refiner is None or request.image_to_refine is None or outline is None:
            self._send(done)
            return
        self._requests.add(
            PendingRefinement(
                request_id=request.request_id,
                tenant=request.tenant,
                deadline=request.request.ends_by,
                done=done,
                outline=outline,
                started=time.monotonic(),
                work=self._pool.submit(self._refiner.prepare, outline, request.image_to_refine),
            )
        )

    def advance(self, request: PendingRefinement, launch: Callable[[Refinement], None]) -> None:
        """Process the completed work; `launch` runs a refinement on the device."""
        if (failure := request.work.exception()) is not None:
            _log.warning(
                "outline_not_refined", request_id=request.request_id.name, reason=repr(failure)
            )
            self.num_unrefined += 1
            self.finish_unrefined(request)
        elif request.refinement is None:
            # The callback must not reference the entry, which references the refinement.
            done = functools.partial(self._on_device_done, request.request_id)
            request.refinement = Refinement(request.work.result(), done)
            launch(request.refinement)
        else:
            self.num_refined += 1
            self._finish(request, request.work.result())

    def finish_unrefined(self, request: PendingRefinement) -> None:
        self._finish(request, request.outline)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _on_device_done(self, request_id: RequestKey, refinement: Refinement) -> None:
        request = self._requests.get(request_id)
        if not isinstance(request, PendingRefinement) or request.refinement is not refinement:
            return  # the id may have been reused
        assert self._refiner is not None, "a refinement was launched without a refiner"
        request.work = self._pool.submit(
            self._refiner.finish, request.outline, refinement.inputs, refinement.result
        )
        self._requests.watch(request)

    def _finish(self, request: PendingRefinement, outline: MaskOutline) -> None:
        self._requests.remove(request.request_id)
        request.cancel()
        timings = request.done.timings
        total = timings.total + time.monotonic() - request.started
        self._send(
            msgspec.structs.replace(
                request.done,
                result=SegmentOutput(segments=(outline,)),
                timings=msgspec.structs.replace(timings, total=total),
            )
        )


def _single_outline(done: Done) -> MaskOutline | None:
    if done.finish_reason is FinishReason.CANCELLED:
        return None
    if not isinstance(done.result, SegmentOutput) or len(done.result.segments) != 1:
        return None
    (outline,) = done.result.segments
    return outline if outline.path else None
