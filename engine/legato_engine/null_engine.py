"""An engine without a model."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable

import msgspec

from legato_engine.config import EngineConfig
from legato_engine.errors import (
    AdapterNotFound,
    DeadlineExceeded,
    ImageNotFound,
    InvalidField,
    LegatoError,
    ModelNotFound,
    to_value,
)
from legato_engine.images.cache import ImageCache, ImageKey, ImageLeases
from legato_engine.images.decoding import content_key, image_id
from legato_engine.images.headers import displayed_size, inspect
from legato_engine.images.memory import image_quota
from legato_engine.images.raw import check_raw
from legato_engine.ipc.messages import (
    Done,
    DropImage,
    EngineOutput,
    Failed,
    HoldImage,
    ImageDropped,
    ImageHeld,
    ImageTotals,
    LaunchSpan,
    OutputDelta,
    PrefillStarted,
    QueuePosition,
    SchedulerLoad,
    ServedModel,
)
from legato_engine.models.confidence import confidence_info
from legato_engine.models.text import SamplingDefaults, max_objects, resolve_sampling, token_budget
from legato_engine.scheduler.interfaces import Clock
from legato_engine.scheduler.queue import Admission, WaitingQueue
from legato_engine.scripted_output import ScriptedOutput, scripted_output
from legato_engine.shm import BlobReader
from legato_engine.telemetry import TimelineStream
from legato_engine.types import (
    SKILLS,
    CachedImageRef,
    DetectSpec,
    EncodedImage,
    FinishReason,
    ImageProperties,
    ImageSource,
    PointSpec,
    RawImage,
    Request,
    RequestKey,
    RequestTimings,
    SamplingParams,
    TaskSpec,
    TokenUsage,
)

IMAGE_TOKENS = 729
MAX_IMAGES = 8


class NullRequest(msgspec.Struct, eq=False):
    """Request with its scripted output; times are monotonic seconds, 0 while unknown."""

    request: Request
    output: ScriptedOutput
    images: tuple[ImageProperties, ...]
    arrival: float
    image_seconds: float
    input_tokens: int
    started: float = 0.0
    first_token: float = 0.0
    num_tokens: int = 0

    @property
    def adapter_key(self) -> str:
        return ""

    @property
    def max_cost(self) -> int:
        return self.input_tokens + len(self.output.events)

    @property
    def cost(self) -> int:
        return self.input_tokens + self.num_tokens

    @property
    def was_started(self) -> bool:
        return self.request.was_admitted

    @property
    def image(self) -> ImageProperties | None:
        return self.images[0] if self.images else None

    @property
    def cached_tokens(self) -> int:
        hits = [image.cache_hit for image in self.images]
        return 1 + IMAGE_TOKENS * len(hits) if hits and all(hits) else 0


# ---------------------------------------------------------------- model

NAME = "null"
_MAX_CONTEXT = 8192  # positions, unless configured
_DEFAULTS = SamplingDefaults(max_tokens=_MAX_CONTEXT)


def info(config: EngineConfig) -> ServedModel:
    max_context = config.max_context or _MAX_CONTEXT
    return ServedModel(
        name=NAME,
        device="none",
        tasks=SKILLS,
        max_context_tokens=max_context,
        max_output_tokens=max_context - IMAGE_TOKENS - 1,
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        max_images=MAX_IMAGES,
        num_parameters=0,
        dtype="none",
        confidence=confidence_info(SKILLS, None),
    )


@functools.lru_cache(1024)
def _scripted(
    task: TaskSpec, sampling: SamplingParams, num_images: int, num_objects: int, max_context: int
) -> tuple[int, ScriptedOutput]:
    """Return the prompt's length and the output, truncated to the context as by a model.

    The prompt is BOS, the images, and a token for each word.

    Raises:
        InvalidField: a field is out of range.
        PromptTooLong: not even one token fits.
    """
    resolved = resolve_sampling(sampling, _DEFAULTS, seed=0)
    assert resolved.max_tokens is not None, "it was resolved"
    if isinstance(task, (DetectSpec, PointSpec)):
        max_objects(task.max_objects, num_objects)
    output = scripted_output(task, sampling, num_objects)
    length = 1 + IMAGE_TOKENS * num_images + output.num_words
    budget = token_budget(resolved.max_tokens, length, max_context)
    if len(output.events) > budget:
        cut = msgspec.structs.replace(sampling, max_tokens=budget)
        output = scripted_output(task, cut, num_objects)
    return length, output


# ---------------------------------------------------------------- images

_RGB = 3  # bytes of a pixel


class NullImages:
    """Cache and leases of images."""

    def __init__(self, config: EngineConfig, blobs: BlobReader) -> None:
        self._blobs = blobs
        self._max_pixels = config.max_image_pixels
        self._cache = ImageCache[ImageKey, ImageProperties](config.image_cache_bytes)
        self.leases = ImageLeases(self._cache, image_quota(config))
        self._num_loaded = 0
        self._num_found = 0

    def __len__(self) -> int:
        return len(self._cache)

    @property
    def totals(self) -> ImageTotals:
        return ImageTotals(
            decoded=self._num_loaded,
            found=self._num_found,
            cached_bytes=self._cache.num_bytes,
            held_bytes=self.leases.num_bytes,
        )

    def find_or_load(self, source: ImageSource, *, tenant: str, keep: bool) -> ImageProperties:
        """Return an image and read its blob; raise as `Preprocessor.start`."""
        if isinstance(source, CachedImageRef):
            cached = self._cached(ImageKey(tenant, source.image_id))
            if cached is None:
                raise ImageNotFound("image not found or expired", resource=source.image_id)
            return cached
        return self._load(source, self._blobs.take(source.blob), tenant=tenant, keep=keep)

    def hold(self, command: HoldImage) -> ImageHeld:
        """Lease an image; raise as `find_or_load`, or `BytesExceeded`."""
        view = self._blobs.take(command.image.blob)
        if command.sha256 and command.sha256 != (actual := content_key(view)):
            raise InvalidField(
                "sha256 does not match the image bytes", field="sha256", actual=actual
            )
        tenant = command.request_id.tenant
        image = self._load(command.image, view, tenant=tenant, keep=False)
        num_bytes = image.width * image.height * _RGB
        key = ImageKey(tenant, image.image_id)
        until = self.leases.hold(
            key, image, num_bytes, command.owner, command.ttl, command.quota_bytes
        )
        return ImageHeld(request_id=command.request_id, image=image, until=until)

    def _cached(self, key: ImageKey) -> ImageProperties | None:
        cached = self._cache.get(key)
        if cached is None:
            return None
        self._num_found += 1
        return msgspec.structs.replace(cached, cache_hit=True)

    def _load(
        self, source: EncodedImage | RawImage, view: memoryview, *, tenant: str, keep: bool
    ) -> ImageProperties:
        raw = source if isinstance(source, RawImage) else None
        key = ImageKey(tenant, image_id(content_key(view, raw)))
        if (cached := self._cached(key)) is not None:
            return cached
        if raw is None:
            header = inspect(view, max_pixels=self._max_pixels, max_bytes=len(view))
            width, height = displayed_size(view, header)
        else:
            check_raw(raw, max_pixels=self._max_pixels)
            width, height = raw.width, raw.height
        image = ImageProperties(image_id=key.image_id, width=width, height=height, cache_hit=False)
        self._num_loaded += 1
        if keep:
            self._cache.put(key, image, width * height * _RGB)
        return image


# ---------------------------------------------------------------- engine


class NullEngine:
    """Engine without a model, with the interface, queue and limits of `EngineCore`.

    A step adds a token to every running request. Steps are `config.null_step_ms` apart. If that is
    0, a request without deltas ends in its first step.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        blobs: BlobReader,
        send: Callable[[EngineOutput], None],
        timeline: TimelineStream | None = None,
    ) -> None:
        self._period = config.null_step_ms / 1000
        self._num_objects = config.null_objects
        self._max_context = config.max_context or _MAX_CONTEXT
        self._send = send
        self._timeline = timeline
        self._images = NullImages(config, blobs)
        self._requests: dict[RequestKey, NullRequest] = {}  # waiting or running
        self._running: dict[RequestKey, NullRequest] = {}
        self._queue = WaitingQueue[NullRequest](
            max_overtakes=0, priority_seconds=config.priority_seconds
        )
        self.num_rows = config.max_running
        self._admission = Admission(
            Clock(),
            self._queue,
            num_rows=self.num_rows,
            rows_free=lambda: self.rows_free,
            max_waiting=config.max_waiting,
            max_waiting_per_tenant=config.max_waiting_per_tenant,
        )
        self._next_step = 0.0
        self._next_deadline = math.inf  # lower bound of all deadlines
        self.steps_committed = 0

    # ------------------------------------------------------------ commands

    def submit(self, request: Request) -> None:
        arrival, resumed = time.monotonic(), request.resumed
        try:
            self._check(request)
            starts = not len(self._queue) and self.rows_free > 0
            must_queue = not (starts or request.was_admitted)
            if must_queue:
                self._make_room(request.tenant, request.priority)
            images = self._load_images(request)
            image_seconds = time.monotonic() - arrival if images else 0.0
            length, output = self._answer(request)
            null_request = NullRequest(request, output, images, arrival, image_seconds, length)
            if must_queue:
                self._admission.check_deadline(null_request)
        except LegatoError as error:
            self._fail(request.request_id, error)
            return
        if resumed is not None:
            null_request.arrival = resumed.arrival
            null_request.first_token = resumed.first_token
            null_request.num_tokens = len(resumed.token_ids)
        if request.deadline is not None and request.deadline < self._next_deadline:
            self._next_deadline = request.deadline
        self._requests[request.request_id] = null_request
        if starts:
            self._queue.serve(null_request)
            self._start(null_request, arrival + image_seconds)
            return
        self._queue.add(null_request)
        if request.progress and not self.rows_free:
            self._send(
                QueuePosition(
                    request_id=request.request_id,
                    position=self._queue.position(null_request),
                    estimated_wait=self.estimated_wait(),
                )
            )

    def _load_images(self, request: Request) -> tuple[ImageProperties, ...]:
        """Return the images and read their blobs; raise as `Preprocessor.start`."""
        if not request.images:
            return ()
        self._images.leases.expire()
        keep, tenant = request.cache_image, request.tenant
        return tuple(
            [self._images.find_or_load(each, tenant=tenant, keep=keep) for each in request.images]
        )

    def stop(self, request_id: RequestKey) -> None:
        now = time.monotonic()
        request = self._requests.get(request_id)
        if request is None:
            return
        if request_id not in self._running:
            self._queue.dequeue(request)
            self._start(request, now)
        self._finish(request, FinishReason.CANCELLED, now)

    def abort(self, request_id: RequestKey) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if self._running.pop(request_id, None) is None:
            self._queue.remove(request)
        self._queue.refund(request)

    def hold(self, command: HoldImage) -> None:
        try:
            if command.request_id in self._requests:
                raise _in_use()
            self._make_room(command.owner)
            self._send(self._images.hold(command))
        except LegatoError as error:
            self._fail(command.request_id, error)

    def drop(self, command: DropImage) -> None:
        try:
            key = ImageKey(command.request_id.tenant, command.image_id)
            self._images.leases.drop(key, command.owner)
            self._send(ImageDropped(request_id=command.request_id))
        except LegatoError as error:
            self._fail(command.request_id, error)

    def set_pipeline_depth(self, depth: int) -> None:
        """Ignore the depth: there is no pipeline."""

    # ------------------------------------------------------------ state

    @property
    def idle(self) -> bool:
        return not self._requests

    @property
    def busy(self) -> bool:
        return bool(self._running) and time.monotonic() >= self._next_step

    @property
    def rows_free(self) -> int:
        return max(0, self.num_rows - len(self._running))  # a stop runs one more

    def load(self) -> SchedulerLoad:
        return SchedulerLoad(
            running=len(self._running),
            waiting=len(self._queue),
            rows_used=len(self._running),
            images_cached=len(self._images),
        )

    def image_totals(self) -> ImageTotals:
        return self._images.totals

    def estimated_wait(self) -> float:
        return self._admission.estimated_wait()

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
        if len(self._queue):
            self._admit(now)
        if not self._running or now < self._next_step:
            return
        self._next_step = now + self._period
        start, running = time.perf_counter_ns(), list(self._running.values())
        tokens = sum([self._advance(request, now) for request in running])
        if self._timeline is not None and self._timeline.watched:
            end = time.perf_counter_ns()
            number, rows = self.steps_committed, len(running)
            span = LaunchSpan(  # without a device a step is the commit alone
                "cpu commit", "commit", start, end - start, number, "decode", rows, 0, 0, tokens
            )
            self._timeline.add_spans((span,), end)
        self.steps_committed += 1
        if len(self._queue):
            self._admit(now)

    def _advance(self, running: NullRequest, now: float) -> int:
        """Return the number of new tokens."""
        request, output = running.request, running.output
        index, count = running.num_tokens, len(output.events)
        running.num_tokens = min(index + 1, count) if request.deltas or self._period else count
        running.first_token = running.first_token or now
        if request.deltas and index < running.num_tokens:
            events = output.events_at(index, request)
            token_ids = (index,)
            self._send(
                OutputDelta(request_id=request.request_id, events=events, token_ids=token_ids)
            )
        if running.num_tokens == count:
            self._finish(running, output.finish_reason, now)
        return running.num_tokens - index

    def _finish(self, running: NullRequest, finish_reason: FinishReason, now: float) -> None:
        request, output = running.request, running.output
        del self._running[request.request_id], self._requests[request.request_id]
        self._queue.refund(running)
        if finish_reason is not FinishReason.CANCELLED:
            self._admission.wait.record_completion(now - running.started)
        num_tokens = running.num_tokens
        self._send(
            Done(
                request_id=request.request_id,
                result=output.result(num_tokens),
                finish_reason=finish_reason,
                usage=TokenUsage(
                    input_tokens=running.input_tokens,
                    output_tokens=num_tokens,
                    cached_tokens=running.cached_tokens,
                    image_tokens=IMAGE_TOKENS * len(running.images),
                    reasoning_tokens=min(num_tokens, output.num_thoughts),
                ),
                timings=RequestTimings.of(
                    arrival=running.arrival,
                    image=running.image_seconds,
                    started=running.started,
                    first_token=running.first_token or now,
                    now=now,
                ),
                image=running.image,
                more_images=running.images[1:],
                tokens=output.tokens(num_tokens, request) if request.return_tokens else (),
            )
        )

    # ------------------------------------------------------------ from a command to running

    def _check(self, request: Request) -> None:
        if request.model not in ("", NAME):
            raise ModelNotFound(f"this engine serves {NAME}", resource=request.model)
        if request.adapter:
            raise AdapterNotFound("this engine holds no adapters", resource=request.adapter)
        if not request.was_admitted and request.request_id in self._requests:
            raise _in_use()

    def _answer(self, request: Request) -> tuple[int, ScriptedOutput]:
        """Return the length of the prompt and the output; raise as `_scripted`.

        Raises:
            InvalidField: a resumed token is not of this output.
        """
        num_images = len(request.images)
        length, output = _scripted(
            request.task, request.sampling, num_images, self._num_objects, self._max_context
        )
        token_ids = () if request.resumed is None else request.resumed.token_ids
        for index, token_id in enumerate(token_ids):
            if token_id != index or index >= len(output.events):  # an id is its index
                raise InvalidField("no such token", field=f"resume_from.token_ids[{index}]")
        return length, output

    def _make_room(self, tenant: str, priority: int = 0) -> None:
        """Make room as `EngineCore` does; no request is in preparation."""
        displaced = self._admission.choose_displaced(tenant, priority, time.monotonic())
        if isinstance(displaced, NullRequest):
            self.abort(displaced.request.request_id)
            self._fail(displaced.request.request_id, self._admission.displaced_error())

    def _admit(self, now: float) -> None:
        while self.rows_free and (waiting := self._queue.first(lambda _: True)) is not None:
            self._queue.dequeue(waiting)
            self._start(waiting, now)

    def _start(self, waiting: NullRequest, now: float) -> None:
        if not self._running:
            self._next_step = now + self._period
        request = waiting.request
        self._running[request.request_id] = waiting
        waiting.started = now
        if not request.progress:
            return
        self._send(
            PrefillStarted(
                request_id=request.request_id,
                model=NAME,
                input_tokens=waiting.input_tokens,
                cached_tokens=waiting.cached_tokens,
                queue_time=max(0.0, now - waiting.arrival - waiting.image_seconds),
                image=waiting.image,
            )
        )

    def _expire(self, now: float) -> None:
        ends = {key: each.request.ends_by for key, each in self._requests.items()}
        self._next_deadline = min((end for end in ends.values() if end > now), default=math.inf)
        for request_id in [key for key, end in ends.items() if end <= now]:
            self.abort(request_id)
            self._fail(request_id, DeadlineExceeded("the deadline passed"))

    def _fail(self, request_id: RequestKey, error: LegatoError) -> None:
        self._send(Failed(request_id=request_id, error=to_value(error)))


def _in_use() -> InvalidField:
    return InvalidField("request id is in use", field="request_id")
