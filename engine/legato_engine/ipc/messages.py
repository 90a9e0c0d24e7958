"""Messages between service processes and the engine."""

from __future__ import annotations

import msgspec

from legato_engine.errors import ErrorValue
from legato_engine.types import (
    CalibrationInfo,
    Certainty,
    EncodedImage,
    Event,
    FinishReason,
    ImageProperties,
    RawImage,
    Request,
    RequestKey,
    RequestTimings,
    TaskOutput,
    TokenInfo,
    TokenUsage,
    Value,
)


class PipelineStats(Value, frozen=True):
    """Medians over a window of decode steps; see `telemetry`."""

    num_steps: int  # in the window
    num_tokens: int  # since the start, first tokens included
    rows: float  # mean
    step_ms: float  # from commit to commit
    forward_ms: float
    sampling_ms: float  # the copy back included
    bookkeeping_ms: float  # host: plan, launch, finalize, commit
    wait_ms: float  # host, for the copy back
    idle_ms: float  # device
    blocking_ms: float  # estimate for a blocking loop
    zombie_ratio: float  # of the rows
    predicted_gain: float  # over a blocking loop; 0.1 is 10 %
    observed_gain: float = 0.0  # as predicted_gain, of the elapsed time instead of medians
    mask_ms: float = 0.0  # of the bookkeeping, for answers with a grammar


class KVCacheStats(Value, frozen=True):
    """Pages of the KV cache by state, and counters since the start."""

    free: int
    idle: int  # cached, evictable
    shared: int  # referenced by several requests
    draft: int  # allocated for draft tokens
    hit_rate: float  # of all prompt positions
    fragmentation_ratio: float  # of all draft pages, those freed without an accepted token
    preemptions: int
    recomputed_tokens: int  # after preemptions
    found_tokens: int = 0  # prompt positions from the prefix cache, of first admissions
    computed_tokens: int = 0  # the other positions of these prompts


SECONDS_BOUNDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 5.0),
)
"""Upper bounds of the bins of an engine's `Durations`; one more bin holds larger values."""


class Durations(msgspec.Struct, frozen=True, array_like=True):
    """A histogram of seconds since the start."""

    counts: tuple[int, ...] = (0,) * (len(SECONDS_BOUNDS) + 1)
    total: float = 0.0  # seconds


class StepTotals(msgspec.Struct, frozen=True, array_like=True):
    """Totals over the engine's launches since its start.

    `decode_seconds` and `idle_seconds` are of the decode steps in `step_times`: their periods, and
    the device's idle time in them.
    """

    launches: dict[str, int] = {}  # by kind
    tokens: int = 0
    step_times: Durations = Durations()
    token_gaps: Durations = Durations()  # between tokens of one request
    decode_seconds: float = 0.0
    idle_seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    forced: int = 0  # of `tokens`, by grammars, beside a sampled one
    blocks: dict[int, int] = {}  # rows with draft tokens, by their number


class ImageTotals(msgspec.Struct, frozen=True, array_like=True):
    """Images of the engine: counts since its start, and bytes."""

    decoded: int = 0
    found: int = 0  # in the cache
    cached_bytes: int = 0
    held_bytes: int = 0


class SchedulerLoad(Value, frozen=True):
    """The engine's current load."""

    running: int = 0
    waiting: int = 0
    preparing: int = 0  # of `waiting`, whose image or adapter is being prepared: no step is due
    inflight: int = 0  # launches not yet committed
    pipeline_depth: int = 0  # launches that may be in flight; 0: no pipeline, or not known
    rows_used: int = 0
    pages_used: int = 0  # by live sequences, shared pages counted once
    prefix_pages: int = 0  # evictable
    pages_total: int = 0
    adapters_used: int = 0  # slots held by live sequences
    images_cached: int = 0
    decode_steps: PipelineStats | None = None  # None before the second decode step
    kv: KVCacheStats | None = None

    @property
    def has_steps(self) -> bool:
        return self.running + self.waiting - self.preparing + self.inflight > 0


# ---------------------------------------------------------------- commands


class Submit(Value, frozen=True):
    """Run this request."""

    request: Request


class Abort(Value, frozen=True):
    """Forget a request; unknown ids are ignored."""

    request_id: RequestKey


class Stop(Value, frozen=True):
    """End a request with its partial result, CANCELLED; unknown ids are ignored."""

    request_id: RequestKey


class HoldImage(Value, frozen=True):
    """Prepare an image, then hold it for `ttl` seconds."""

    request_id: RequestKey
    image: EncodedImage | RawImage
    owner: str
    ttl: float
    sha256: str = ""  # hex digest of the blob; empty: not checked
    quota_bytes: int = 0  # of the owner's held images; 0: `image_quota_bytes`


class DropImage(Value, frozen=True):
    """End the hold of `owner` on an image."""

    request_id: RequestKey
    image_id: str
    owner: str


class StopElsewhere(Value, frozen=True):
    """`Stop` matching requests of the other service processes, or all."""

    request_id: RequestKey
    target: RequestKey | None = None


class Expect(Value, frozen=True):
    """A `Submit` may follow: poll for it."""


class WatchTimeline(Value, frozen=True):
    """Send `TimelineBatch`es to this service process, or no more."""

    watching: bool


class SetPipelineDepth(Value, frozen=True):
    """Have at most `depth` launches in flight, from the next step on."""

    depth: int


class Shutdown(Value, frozen=True):
    """Exit with code 0 and finish no request."""


Command = (
    Submit
    | Abort
    | Stop
    | HoldImage
    | DropImage
    | StopElsewhere
    | Expect
    | WatchTimeline
    | SetPipelineDepth
    | Shutdown
)


# ---------------------------------------------------------------- messages

# The outputs of a request are `QueuePosition`? `PrefillStarted` `OutputDelta`*, as far as it wants
# progress, then one `Done` or `Failed`. An image command has one output, an aborted request no
# further one.
#
# A service process ignores outputs that it did not receive: it submits the request to the next
# engine with the tokens of the received deltas.


class ServedModel(Value, frozen=True):
    """The served model."""

    name: str
    device: str
    tasks: tuple[str, ...]
    max_context_tokens: int
    max_output_tokens: int
    max_running: int
    max_waiting: int
    num_parameters: int
    dtype: str
    max_images: int = 1  # of a query
    adapters: bool = False
    kv_dtype: str = ""  # empty without a KV cache
    kv_token_bytes: int = 0  # of KV cache per position
    confidence: CalibrationInfo | None = None  # None: results have none
    notice: str = ""


class Loading(Value, frozen=True):
    """Progress of the start; `fraction` in 0..1."""

    stage: str
    fraction: float


class Ready(Value, frozen=True):
    """The engine is ready to serve."""

    model: ServedModel
    pid: int


class RunningAlone(Value, frozen=True):
    """The engine runs only this request, which may have crashed others; None: any.

    Sent to all service processes before the request begins.
    """

    request_id: RequestKey | None
    fingerprint: str = ""
    is_last: bool = False


class Heartbeat(Value, frozen=True):
    """Sent every `heartbeat_interval`, also during a long step.

    An engine with work for a step whose `step` does not change is stuck.
    """

    step: int
    load: SchedulerLoad
    estimated_wait: float  # seconds
    steps: StepTotals = StepTotals()
    images: ImageTotals = ImageTotals()


class QueuePosition(Value, frozen=True):
    """The request waits; `position` 0 is next."""

    request_id: RequestKey
    position: int
    estimated_wait: float


class PrefillStarted(Value, frozen=True):
    """Prefill was launched."""

    request_id: RequestKey
    model: str
    input_tokens: int
    cached_tokens: int
    queue_time: float
    image: ImageProperties | None = None


class OutputDelta(Value, frozen=True):
    """Events of one commit, and all tokens since the last delta as columns of `Resumed`."""

    request_id: RequestKey
    events: tuple[Event, ...]
    token_ids: tuple[int, ...] = ()
    payloads: tuple[tuple[float, float], ...] = ()
    logprobs: tuple[float, ...] = ()
    certainties: tuple[Certainty, ...] = ()


class Done(Value, frozen=True):
    """The whole result."""

    request_id: RequestKey
    result: TaskOutput
    finish_reason: FinishReason
    usage: TokenUsage
    timings: RequestTimings
    image: ImageProperties | None = None
    tokens: tuple[TokenInfo, ...] = ()
    preemptions: int = 0
    resumptions: int = 0  # set by the service
    more_images: tuple[ImageProperties, ...] = ()  # of a query about several


class ImageHeld(Value, frozen=True):
    """An image is held; `until` is in `time.monotonic()` seconds."""

    request_id: RequestKey
    image: ImageProperties
    until: float


class ImageDropped(Value, frozen=True):
    """This owner's hold has ended."""

    request_id: RequestKey


class Failed(Value, frozen=True):
    """The request failed."""

    request_id: RequestKey
    error: ErrorValue


class StoppedCalls(Value, frozen=True):
    """The calls that `StopElsewhere` stopped; parts of a call count once."""

    request_id: RequestKey
    count: int


class LaunchSpan(msgspec.Struct, frozen=True, array_like=True):
    """Part of a launch; times are nanoseconds of the monotonic clock.

    `kind` is that of the launch; `riding` decodes share a prefill, and `zombies` had ended before.
    `tokens` were generated by the launch.
    """

    lane: str
    name: str
    start: int
    duration: int
    launch: int
    kind: str
    rows: int
    riding: int
    zombies: int
    tokens: int = 0


class TimelineBatch(Value, frozen=True):
    """Spans of the launches committed since the last batch, and the cost of decode steps.

    `started` is the engine's start in nanoseconds of the monotonic clock, which identifies it.
    """

    spans: tuple[LaunchSpan, ...]
    decode_steps: PipelineStats | None = None
    started: int = 0
    pipeline_depth: int = 0  # of the last launch; 0: the engine has no pipeline


EngineOutput = (
    QueuePosition | PrefillStarted | OutputDelta | Done | ImageHeld | ImageDropped | Failed
)
"""An output of one request or image command."""

FINAL = (Done, Failed, ImageHeld, ImageDropped)  # the last outputs of their request id

EngineMessage = (
    Loading | Ready | RunningAlone | Heartbeat | EngineOutput | StoppedCalls | TimelineBatch
)


# ---------------------------------------------------------------- codec

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_engine_message = msgspec.msgpack.Decoder(EngineMessage).decode
