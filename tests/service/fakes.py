"""A scripted engine, with the real client's streams and blobs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from legato_engine.client.connection import Siblings
from legato_engine.client.monitor import EngineState
from legato_engine.client.request_stream import RequestStream, Restage, StreamOutput
from legato_engine.client.timeline_watch import TimelineWatch
from legato_engine.errors import Draining, EngineLost, EngineStarting, ImageNotFound, LegatoError
from legato_engine.images.decoding import content_key, image_id
from legato_engine.ipc.messages import (
    Done,
    DropImage,
    HoldImage,
    ImageHeld,
    ImageTotals,
    OutputDelta,
    PrefillStarted,
    SchedulerLoad,
    ServedModel,
    StepTotals,
)
from legato_engine.shm import BlobReader, BlobStore, new_namespace
from legato_engine.types import (
    CachedImageRef,
    CaptionOutput,
    CaptionSpec,
    DetectOutput,
    DetectSpec,
    Event,
    FinishReason,
    GroundedText,
    ImageBox,
    ImagePoint,
    ImageProperties,
    ImageSource,
    MaskOutline,
    ObjectEvent,
    OutlineEvent,
    PointEvent,
    PointOutput,
    PointSpec,
    QueryOutput,
    QuerySpec,
    RawImage,
    ReasoningEvent,
    Request,
    RequestKey,
    RequestTimings,
    SegmentOutput,
    SegmentSpec,
    TaskOutput,
    TaskSpec,
    TextEvent,
    TokenUsage,
)

MODEL = ServedModel(
    name="fake-1",
    device="cpu",
    tasks=("query", "caption", "detect", "point", "segment"),
    max_context_tokens=2048,
    max_output_tokens=512,
    max_running=16,
    max_waiting=256,
    num_parameters=1_000_000,
    dtype="f32",
)
BOX = ImageBox(x_min=0.1, y_min=0.2, x_max=0.5, y_max=0.75)
POINT = ImagePoint(x=0.25, y=0.5)
USAGE = TokenUsage(input_tokens=740, output_tokens=9, cached_tokens=730, image_tokens=729)
TIMINGS = RequestTimings(
    queue=0.001, image=0.002, prefill=0.003, first_token=0.006, decode=0.5, total=0.506
)
IMAGE = ImageProperties(image_id="img_0", width=640, height=480, cache_hit=False)

Script = Callable[["FakeEngine", RequestStream], None]


class FakeEngine:
    """Runs `script` on every request; the default responds at once."""

    def __init__(self, script: Script | None = None, number: int = 0) -> None:
        self.script = script or answer
        self.number = number
        self.device = "cpu"
        self.siblings: Siblings | None = None
        self.num_elsewhere = 0
        self.state = EngineState.READY
        self.model: ServedModel | None = MODEL
        self.load = SchedulerLoad()
        self.step_totals = StepTotals()
        self.image_totals = ImageTotals()
        self.pid = self.restarts = self.resumptions = self.num_poisoned = 0
        self.watched: list[bool] = []  # what the engine was asked
        self.timeline = TimelineWatch(self.watched.append)
        self.depths: list[int] = []  # that the engine was told to have
        self.step = 0
        self.estimated_wait = 0.0
        self.blobs = BlobStore(new_namespace())
        self.requests: list[Request] = []
        self.expected = 0
        self.streams: dict[RequestKey, RequestStream] = {}
        self.aborted: list[RequestKey] = []  # as the engine process would get them
        self.stopped: list[RequestKey] = []
        self.started: set[RequestKey] = set()
        self.held: dict[tuple[str, str], float] = {}  # (owner, image id): until when
        self.holds: list[HoldImage] = []
        self.refuses_holds: LegatoError | None = None
        self.may_answer = asyncio.Event()  # holds wait for it
        self.may_answer.set()
        self._subscribers: list[Callable[[EngineState], None]] = []

    @property
    def last_heartbeat(self) -> float:
        """Now."""
        return time.monotonic()

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self.streams)

    def subscribe(self, callback: Callable[[EngineState], None]) -> None:
        """Call `callback` with every new state."""
        self._subscribers.append(callback)

    def become(self, state: EngineState) -> None:
        """Change state; a lost engine loses its requests."""
        self.state = state
        if state is EngineState.LOST:
            for stream in list(self.streams.values()):
                self._forget(stream)
                stream.fail(EngineLost("the engine process died"))
        for callback in self._subscribers:
            callback(state)

    def drain(self) -> None:
        """Refuse new requests, as the real one does."""
        self.become(EngineState.DRAINING)

    def set_pipeline_depth(self, depth: int) -> None:
        """Keep it."""
        self.depths.append(depth)

    def expect(self) -> None:
        """Count expected requests."""
        self.expected += 1

    def submit(
        self, request: Request, restage: Restage | None = None, *, may_wait: bool = False
    ) -> RequestStream:
        """Register at once and discard the blob in any case, as the real one does."""
        refusals: dict[EngineState, LegatoError] = {
            EngineState.STARTING: EngineStarting("loading"),
            EngineState.LOST: EngineLost("restarting"),
            EngineState.HUNG: EngineLost("hung"),
            EngineState.DRAINING: Draining("draining"),
        }
        stream = RequestStream(request, self._on_abort, self._on_stop, restage)
        if self.state in refusals:
            self._forget(stream)
            raise refusals[self.state]
        self.requests.append(request)
        self.streams[request.request_id] = stream
        self.script(self, stream)
        return stream

    def adopt(self, stream: RequestStream, *, renew: bool = True) -> None:
        """Run the request of another engine."""
        stream.on_abort, stream.on_stop = self._on_abort, self._on_stop
        if renew and stream.restage is not None:
            stream.request = stream.request.with_images(stream.restage(self.blobs))
        self.requests.append(stream.request)
        self.streams[stream.request_id] = stream
        self.script(self, stream)

    def offer_waiting(self) -> None:
        """No request waits."""

    async def hold(self, command: HoldImage) -> ImageHeld:
        """Do nothing; the test feeds the stream itself."""
        self.holds.append(command)
        try:
            await self.may_answer.wait()
            if self.refuses_holds is not None:
                raise self.refuses_holds
            raw = command.image if isinstance(command.image, RawImage) else None
            data = bytes(BlobReader(self.blobs.namespace).take(command.image.blob))
        finally:
            self.blobs.discard(command.image.blob)
        name = image_id(content_key(data, raw))
        known = any(name == held for _, held in self.held)
        until = self.held[command.owner, name] = time.monotonic() + command.ttl
        info = ImageProperties(image_id=name, width=640, height=480, cache_hit=known)
        return ImageHeld(request_id=command.request_id, image=info, until=until)

    async def drop(self, command: DropImage) -> None:
        """Release a held image."""
        if self.held.pop((command.owner, command.image_id), None) is None:
            raise ImageNotFound("not held", resource=command.image_id)

    def feed(self, stream: RequestStream, *reports: StreamOutput) -> None:
        """Feed outputs to a stream."""
        for report in reports:
            if isinstance(report, PrefillStarted):
                self.started.add(stream.request_id)
            if self.siblings is not None and isinstance(report, (PrefillStarted, Done)):
                self.siblings.record_image(stream, report, self.number)
            stream.feed(report)
        if stream.ended:
            self._forget(stream)

    def fail(self, stream: RequestStream, error: LegatoError) -> None:
        """Fail a request."""
        self._forget(stream)
        stream.fail(error)

    def _on_abort(self, stream: RequestStream) -> None:
        self.aborted.append(stream.request_id)
        self._forget(stream)

    def _on_stop(self, stream: RequestStream) -> None:
        """As the real one: `PrefillStarted` unless sent, then the partial result, CANCELLED."""
        self.stopped.append(stream.request_id)
        if stream.request_id not in self.started:
            self.feed(stream, started(stream.request))
        result = empty(stream.request.task)
        self.feed(stream, done(stream.request, result, FinishReason.CANCELLED))

    def _forget(self, stream: RequestStream) -> None:
        self.streams.pop(stream.request_id, None)
        for blob in stream.request.blobs:
            self.blobs.discard(blob)


def started(request: Request) -> PrefillStarted:
    """Return the output of a launched prefill."""
    return PrefillStarted(
        request_id=request.request_id,
        model=MODEL.name,
        input_tokens=USAGE.input_tokens,
        cached_tokens=USAGE.cached_tokens,
        queue_time=TIMINGS.queue,
        image=image_of(request.image),
    )


def delta(request: Request, *events: Event) -> OutputDelta:
    """Return what one step added."""
    return OutputDelta(request_id=request.request_id, events=events)


def done(
    request: Request,
    result: TaskOutput,
    reason: FinishReason = FinishReason.STOP,
) -> Done:
    """Return the end of a request."""
    return Done(
        request_id=request.request_id,
        result=result,
        finish_reason=reason,
        usage=USAGE,
        timings=TIMINGS,
        image=image_of(request.image),
        more_images=tuple(info for each in request.more_images if (info := image_of(each))),
    )


def image_of(source: ImageSource | None) -> ImageProperties | None:
    """Return the image of a result; one named by its id was seen before."""
    if isinstance(source, CachedImageRef):
        return ImageProperties(image_id=source.image_id, width=640, height=480, cache_hit=True)
    return IMAGE if source is not None else None


def solution(task: TaskSpec) -> tuple[Sequence[Event], TaskOutput]:
    """Return the events and the result of a task."""
    match task:
        case QuerySpec(reasoning=True):
            spans = (GroundedText(start_index=0, end_index=2, points=(POINT,)),)
            events = (
                ReasoningEvent(text="Hm. "),
                ReasoningEvent(text="", grounding=spans),
                TextEvent(text="Four."),
            )
            return events, QueryOutput(answer="Four.", reasoning="Hm. ", grounding=spans)
        case QuerySpec():
            return words("Three", " red", " cups."), QueryOutput(answer="Three red cups.")
        case CaptionSpec():
            return words("A", " shelf."), CaptionOutput(caption="A shelf.")
        case DetectSpec(object=label):
            found = ObjectEvent(box=BOX, label=label)
            return (found, found), DetectOutput(objects=(found, found))
        case PointSpec(object=label):
            spot = PointEvent(point=POINT, label=label)
            return (spot,), PointOutput(points=(spot,))
        case SegmentSpec(object=label):
            pieces = (
                OutlineEvent(index=0, box=BOX),
                OutlineEvent(index=0, path_delta="M 0 0 "),
                OutlineEvent(index=0, path_delta="L 1 1 Z"),
            )
            outline = MaskOutline(path="M 0 0 L 1 1 Z", box=BOX, label=label)
            return pieces, SegmentOutput(segments=(outline,))


def empty(task: TaskSpec) -> TaskOutput:
    """Return the empty result of a stopped task."""
    match task:
        case QuerySpec():
            return QueryOutput(answer="")
        case CaptionSpec():
            return CaptionOutput(caption="")
        case DetectSpec():
            return DetectOutput()
        case PointSpec():
            return PointOutput()
        case SegmentSpec():
            return SegmentOutput()


def words(*texts: str) -> tuple[TextEvent, ...]:
    """Return text in pieces."""
    return tuple(TextEvent(text=text) for text in texts)


def answer(engine: FakeEngine, stream: RequestStream) -> None:
    """Respond at once, with one delta per event."""
    request = stream.request
    events, result = solution(request.task)
    deltas = [delta(request, event) for event in events]
    engine.feed(stream, started(request), *deltas, done(request, result))


def hold(engine: FakeEngine, stream: RequestStream) -> None:
    """Hold an image by its content, as one of 640 by 480 pixels."""


def begin(engine: FakeEngine, stream: RequestStream) -> None:
    """Start, and do nothing more."""
    engine.feed(stream, started(stream.request))


def refuse(error: LegatoError) -> Script:
    """Fail every request with `error`."""

    def script(engine: FakeEngine, stream: RequestStream) -> None:
        engine.fail(stream, error)

    return script
