"""An engine without a model."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

from legato_engine.config import EngineConfig
from legato_engine.core import FinishReason, Request, RequestKey
from legato_engine.errors import (
    AdapterNotFound,
    DeadlineExceeded,
    LegatoError,
    ModelNotFound,
    QueueFull,
    to_value,
)
from legato_engine.ipc.messages import (
    Delta,
    Done,
    DropImage,
    EngineOutput,
    Failed,
    HoldImage,
    ImageDropped,
    Load,
    ModelInfo,
    Queued,
    Started,
)
from legato_engine.null.images import NullImages
from legato_engine.null.request import IMAGE_TOKENS, NullRequest
from legato_engine.null.scripted_output import scripted_output
from legato_engine.shm.blob_reader import BlobReader

NAME = "null"
_NAMES = ("", NAME)
_MAX_CONTEXT = 8192


def info(config: EngineConfig) -> ModelInfo:
    return ModelInfo(
        name=NAME,
        device="none",
        tasks=("query", "caption", "detect", "point", "segment"),
        max_context_tokens=_MAX_CONTEXT,
        max_output_tokens=_MAX_CONTEXT - IMAGE_TOKENS - 1,
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        num_parameters=0,
        dtype="none",
    )


class NullEngine:
    """Has the interface of `EngineCore`; a step adds a token to every running request.

    Steps are `config.null_step_ms` apart. If that is 0, all requests run at once, and one without
    deltas ends in its first step.
    """

    def __init__(
        self, config: EngineConfig, *, blobs: BlobReader, send: Callable[[EngineOutput], None]
    ) -> None:
        self._period = config.null_step_ms / 1000
        self._max_running = config.max_running if self._period else sys.maxsize
        self._max_waiting = config.max_waiting
        self._max_requests = self._max_running + self._max_waiting
        self._num_objects = config.null_objects
        self._send = send
        self._images = NullImages(config, blobs)
        self._waiting: dict[RequestKey, NullRequest] = {}
        self._running: dict[RequestKey, NullRequest] = {}
        self._next_step = 0.0
        self._next_deadline = math.inf  # no request has an earlier one
        self.steps_committed = 0

    # ------------------------------------------------------------ commands

    def submit(self, request: Request) -> None:
        arrival, resumed = time.monotonic(), request.resumed
        image, image_seconds = None, 0.0
        try:
            if request.adapter or request.model not in _NAMES or self._overfull(request):
                raise self._refusal(request)
            if request.image is not None:
                self._images.leases.expire()
                image = self._images.find_or_load(
                    request.image, tenant=request.tenant, keep=request.cache_image
                )
                image_seconds = time.monotonic() - arrival
        except LegatoError as error:
            self._fail(request, error)
            return
        output = scripted_output(request.task, request.sampling, self._num_objects)
        null_request = NullRequest(request, output, image, arrival, image_seconds)
        if resumed is not None:
            null_request.arrival = resumed.arrival
            null_request.first_token = resumed.first_token
            null_request.num_tokens = len(resumed.token_ids)
        if request.deadline is not None and request.deadline < self._next_deadline:
            self._next_deadline = request.deadline
        if not self._waiting and len(self._running) < self._max_running:
            self._start(null_request, arrival + image_seconds)
            return
        must_wait = self._full
        self._waiting[request.request_id] = null_request
        if must_wait and request.progress:
            self._announce_queued(request.request_id)

    def stop(self, request_id: RequestKey) -> None:
        now = time.monotonic()
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._start(waiting, now)
        running = self._running.get(request_id)
        if running is not None:
            self._finish(running, FinishReason.CANCELLED, now)

    def abort(self, request_id: RequestKey) -> None:
        self._waiting.pop(request_id, None)
        self._running.pop(request_id, None)

    def hold(self, command: HoldImage) -> None:
        try:
            self._send(self._images.hold(command))
        except LegatoError as error:
            self._send(Failed(request_id=command.request_id, error=to_value(error)))

    def drop(self, command: DropImage) -> None:
        try:
            self._images.drop(command)
            self._send(ImageDropped(request_id=command.request_id))
        except LegatoError as error:
            self._send(Failed(request_id=command.request_id, error=to_value(error)))

    # ------------------------------------------------------------ state

    @property
    def idle(self) -> bool:
        return not (self._running or self._waiting)

    @property
    def busy(self) -> bool:
        return bool(self._running) and time.monotonic() >= self._next_step

    def load(self) -> Load:
        return Load(
            running=len(self._running),
            waiting=len(self._waiting),
            rows_used=len(self._running),
            images_cached=len(self._images),
        )

    def estimated_wait(self) -> float:
        """Seconds that a new request would wait if all were as long as the longest."""
        if not self._full:
            return 0.0
        requests = (*self._running.values(), *self._waiting.values())
        left = max(len(each.output.events) - each.num_tokens for each in requests)
        return left * self._period * (1 + len(self._waiting) / self._max_running)

    def next_deadline(self) -> float:
        first = min(self._next_deadline, self._images.leases.next_expiry)
        return min(first, self._next_step) if self._running else first

    # ------------------------------------------------------------ the step

    def step(self) -> None:
        now = time.monotonic()
        if now >= self._images.leases.next_expiry:
            self._images.leases.expire()
        if now >= self._next_deadline:
            self._expire(now)
        if self._waiting:
            self._admit(now)
        if not self._running or now < self._next_step:
            return
        self.steps_committed += 1
        self._next_step = now + self._period
        for request in list(self._running.values()):
            self._advance(request, now)
        if self._waiting:
            self._admit(now)

    def _advance(self, running: NullRequest, now: float) -> None:
        request, output = running.request, running.output
        index, count = running.num_tokens, len(output.events)
        running.num_tokens = min(index + 1, count) if request.deltas or self._period else count
        running.first_token = running.first_token or now
        if request.deltas and index < running.num_tokens:
            events = output.events_at(index, request)
            token_ids = (index,)
            self._send(Delta(request_id=request.request_id, events=events, token_ids=token_ids))
        if running.num_tokens == count:
            self._finish(running, output.finish_reason, now)

    def _finish(self, running: NullRequest, finish_reason: FinishReason, now: float) -> None:
        request, output = running.request, running.output
        del self._running[request.request_id]
        num_tokens = running.num_tokens
        self._send(
            Done(
                request_id=request.request_id,
                result=output.result(num_tokens),
                finish_reason=finish_reason,
                usage=running.usage(),
                timings=running.timings(now),
                image=running.image,
                tokens=output.tokens(num_tokens, request) if request.return_tokens else (),
            )
        )

    # ------------------------------------------------------------ from waiting to running

    @property
    def _full(self) -> bool:
        return len(self._running) + len(self._waiting) >= self._max_running

    def _overfull(self, request: Request) -> bool:
        num_requests = len(self._running) + len(self._waiting)
        return num_requests >= self._max_requests and request.resumed is None

    def _refusal(self, request: Request) -> LegatoError:
        if request.model not in _NAMES:
            return ModelNotFound(f"this engine serves {NAME}", resource=request.model)
        if request.adapter:
            return AdapterNotFound("this engine holds no adapters", resource=request.adapter)
        return QueueFull(
            "the waiting queue is full",
            limit=self._max_waiting,
            retry_after_ms=max(1, round(self.estimated_wait() * 1000)),
        )

    def _admit(self, now: float) -> None:
        num_free = self._max_running - len(self._running)
        if num_free <= 0:
            return
        for request_id in list(self._waiting)[:num_free]:
            self._start(self._waiting.pop(request_id), now)

    def _start(self, waiting: NullRequest, now: float) -> None:
        if not self._running:
            self._next_step = now + self._period
        request = waiting.request
        self._running[request.request_id] = waiting
        waiting.started = now
        if not request.progress:
            return
        self._send(
            Started(
                request_id=request.request_id,
                model=NAME,
                input_tokens=waiting.input_tokens,
                cached_tokens=waiting.cached_tokens,
                queue_time=waiting.queue_time,
                image=waiting.image,
            )
        )

    def _announce_queued(self, request_id: RequestKey) -> None:
        position, wait = len(self._waiting) - 1, self.estimated_wait()
        self._send(Queued(request_id=request_id, position=position, estimated_wait=wait))

    def _expire(self, now: float) -> None:
        requests = [each.request for each in (*self._waiting.values(), *self._running.values())]
        self._next_deadline = math.inf
        for request in requests:
            if request.deadline is None:
                continue
            if request.deadline <= now:
                self.abort(request.request_id)
                self._fail(request, DeadlineExceeded("the deadline passed"))
            else:
                self._next_deadline = min(self._next_deadline, request.deadline)

    def _fail(self, request: Request, error: LegatoError) -> None:
        self._send(Failed(request_id=request.request_id, error=to_value(error)))
