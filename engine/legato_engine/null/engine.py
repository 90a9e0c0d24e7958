"""An engine without a model: real messages, real pictures in, made-up answers out.

For load tests, for clients' tests, and for measuring what everything around the model costs.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

from legato_engine.config import EngineConfig
from legato_engine.core import FinishReason, Request
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
from legato_engine.null.answers import answer
from legato_engine.null.images import NullImages
from legato_engine.null.request import IMAGE_TOKENS, NullRequest
from legato_engine.shm.blob_reader import BlobReader

NAME = "null"
_NAMES = ("", NAME)
_MAX_CONTEXT = 8192


def info(config: EngineConfig) -> ModelInfo:
    """What the service is told."""
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
    """Answers as `EngineCore` does, a token a step for everybody who runs.

    With a `config.null_step_ms` of 0 a step takes no time and all run at once; who reads no deltas
    is answered in its first step. Otherwise steps are that far apart, `config.max_running` run and
    the others wait. Pictures are hashed and sized, not decoded. Single-threaded, as `EngineCore`.
    """

    def __init__(
        self, config: EngineConfig, *, blobs: BlobReader, send: Callable[[EngineOutput], None]
    ) -> None:
        self._period = config.null_step_ms / 1000
        self._max_running = config.max_running if self._period else sys.maxsize
        self._max_waiting = config.max_waiting
        self._max_jobs = self._max_running + self._max_waiting
        self._num_objects = config.null_objects
        self._send = send
        self._pictures = NullImages(config, blobs)
        self._waiting: dict[str, NullRequest] = {}
        self._running: dict[str, NullRequest] = {}
        self._next_step = 0.0
        self._first_deadline = math.inf  # of all those there were since it passed
        self.steps_committed = 0

    # ------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        """Begin a request; whatever is wrong with it becomes its `Failed` report."""
        arrival = time.monotonic()
        image, image_seconds = None, 0.0
        try:
            num_jobs = len(self._running) + len(self._waiting)
            if request.adapter or request.model not in _NAMES or num_jobs >= self._max_jobs:
                raise self._refusal(request)
            if request.image is not None:
                self._pictures.holds.expire()
                image = self._pictures.take(request.image, keep=request.cache_image)
                image_seconds = time.monotonic() - arrival
        except LegatoError as error:
            self._fail(request, error)
            return
        told = answer(request.task, request.sampling, self._num_objects)
        job = NullRequest(request, told, image, arrival, image_seconds)
        if request.deadline is not None and request.deadline < self._first_deadline:
            self._first_deadline = request.deadline
        if not self._waiting and len(self._running) < self._max_running:
            self._start(job, arrival + image_seconds)
            return
        must_wait = self._full
        self._waiting[request.request_id] = job
        if must_wait and request.progress:
            self._announce_queued(request.request_id)

    def stop(self, request_id: str) -> None:
        """End a request now with what it has, as cancelled; unknown ids are ignored."""
        now = time.monotonic()
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._start(waiting, now)
        job = self._running.get(request_id)
        if job is not None:
            self._end(job, FinishReason.CANCELLED, now)

    def abort(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        self._waiting.pop(request_id, None)
        self._running.pop(request_id, None)

    def hold(self, command: HoldImage) -> None:
        """Hold a picture, as far as this engine knows any."""
        try:
            self._send(self._pictures.hold(command))
        except LegatoError as error:
            self._send(Failed(request_id=command.request_id, error=to_value(error)))

    def drop(self, command: DropImage) -> None:
        """Hold it no longer."""
        try:
            self._pictures.holds.drop(command.image_id, command.owner)
            self._send(ImageDropped(request_id=command.request_id))
        except LegatoError as error:
            self._send(Failed(request_id=command.request_id, error=to_value(error)))

    # ------------------------------------------------------------ state

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do now."""
        return bool(self._running) and time.monotonic() >= self._next_step

    def load(self) -> Load:
        """What is held right now."""
        return Load(
            running=len(self._running),
            waiting=len(self._waiting),
            rows_used=len(self._running),
            images_cached=len(self._pictures),
        )

    def estimated_wait(self) -> float:
        """Seconds a request arriving now would wait, if all were as long as the longest."""
        if not self._full:
            return 0.0
        jobs = (*self._running.values(), *self._waiting.values())
        left = max(len(job.answer.events) - job.num_tokens for job in jobs)
        return left * self._period * (1 + len(self._waiting) / self._max_running)

    def next_deadline(self) -> float:
        """Monotonic time by which `step` must be called even if nothing wakes the loop."""
        first = min(self._first_deadline, self._pictures.holds.next_expiry)
        return min(first, self._next_step) if self._running else first

    # ------------------------------------------------------------ the tick

    def step(self) -> None:
        """Expire and admit; a token for everybody if it is time for one."""
        now = time.monotonic()
        if now >= self._pictures.holds.next_expiry:
            self._pictures.holds.expire()
        if now >= self._first_deadline:
            self._expire(now)
        if self._waiting:
            self._admit(now)
        if not self._running or now < self._next_step:
            return
        self.steps_committed += 1
        self._next_step = now + self._period
        for job in list(self._running.values()):
            self._advance(job, now)
        if self._waiting:
            self._admit(now)

    def _advance(self, job: NullRequest, now: float) -> None:
        """One token, or all at once when neither the clock nor anybody who reads them waits."""
        count, deltas = len(job.answer.events), job.request.deltas
        before = job.num_tokens
        job.num_tokens = min(before + 1, count) if deltas or self._period else count
        job.first_token = job.first_token or now
        if deltas and before < job.num_tokens:
            told = job.answer.told(before, job.request)
            self._send(Delta(request_id=job.request.request_id, events=told))
        if job.num_tokens == count:
            self._end(job, job.answer.finish_reason, now)

    def _end(self, job: NullRequest, finish_reason: FinishReason, now: float) -> None:
        request, told = job.request, job.answer
        del self._running[request.request_id]
        self._send(
            Done(
                request_id=request.request_id,
                result=told.result(job.num_tokens),
                finish_reason=finish_reason,
                usage=job.usage(),
                timings=job.timings(now),
                image=job.image,
                tokens=told.tokens(job.num_tokens, request) if request.return_tokens else (),
            )
        )

    # ------------------------------------------------------------ who runs

    @property
    def _full(self) -> bool:
        return len(self._running) + len(self._waiting) >= self._max_running

    def _refusal(self, request: Request) -> LegatoError:
        if request.model not in _NAMES:
            return ModelNotFound(f"this engine serves {NAME}", resource=request.model)
        if request.adapter:
            return AdapterNotFound("no such adapter", resource=request.adapter)
        return QueueFull(
            "the waiting queue is full",
            limit=self._max_waiting,
            retry_after_ms=max(1, round(self.estimated_wait() * 1000)),
        )

    def _admit(self, now: float) -> None:
        """Start those who wait, first come first served, while there is room."""
        room = self._max_running - len(self._running)
        if room <= 0:
            return
        for request_id in list(self._waiting)[:room]:
            self._start(self._waiting.pop(request_id), now)

    def _start(self, job: NullRequest, now: float) -> None:
        if not self._running:
            self._next_step = now + self._period
        request = job.request
        self._running[request.request_id] = job
        job.started = now
        if not request.progress:
            return
        self._send(
            Started(
                request_id=request.request_id,
                model=NAME,
                input_tokens=job.input_tokens,
                cached_tokens=job.cached_tokens,
                queue_time=job.queue_time,
                image=job.image,
            )
        )

    def _announce_queued(self, request_id: str) -> None:
        position, wait = len(self._waiting) - 1, self.estimated_wait()
        self._send(Queued(request_id=request_id, position=position, estimated_wait=wait))

    def _expire(self, now: float) -> None:
        requests = [job.request for job in (*self._waiting.values(), *self._running.values())]
        self._first_deadline = math.inf
        for request in requests:
            if request.deadline is None:
                continue
            if request.deadline <= now:
                self.abort(request.request_id)
                self._fail(request, DeadlineExceeded("the deadline passed"))
            else:
                self._first_deadline = min(self._first_deadline, request.deadline)

    def _fail(self, request: Request, error: LegatoError) -> None:
        self._send(Failed(request_id=request.request_id, error=to_value(error)))
