"""Messages between a service process and the engine process, msgpack-encoded.

Commands go to the engine, outputs come back. The outputs of a request are, in order: `Queued`?
`Started` `Delta`*, then exactly one `Done` or `Failed`. Those before the last are sent only if the
request wants them. The one output of `HoldImage` is `ImageHeld` or `Failed`, that of `DropImage` is
`ImageDropped` or `Failed`. An aborted request has no further output.
"""

from __future__ import annotations

import msgspec

from legato_engine.core import (
    EncodedImage,
    Event,
    FinishReason,
    ImageInfo,
    RawImage,
    Request,
    RequestKey,
    TaskResult,
    Timings,
    TokenInfo,
    Usage,
    Value,
)
from legato_engine.errors import ErrorValue


class Submit(Value, frozen=True):
    """Run this request."""

    request: Request


class Abort(Value, frozen=True):
    """Forget a request; unknown ids are ignored."""

    request_id: RequestKey


class Stop(Value, frozen=True):
    """End a request with its partial result: `Done` says CANCELLED. Unknown ids are ignored."""

    request_id: RequestKey


class HoldImage(Value, frozen=True):
    """Prepare an image and hold it for `owner`, for `ttl` seconds after its preparation."""

    request_id: RequestKey
    image: EncodedImage | RawImage
    owner: str
    ttl: float
    sha256: str = ""  # hex digest of the blob's bytes; empty: not checked


class DropImage(Value, frozen=True):
    """End the hold of `owner` on an image; an image without holds is freed."""

    request_id: RequestKey
    image_id: str
    owner: str


class StopElsewhere(Value, frozen=True):
    """`Stop` requests of the other service processes: all, or those that match `target`.

    The reply is `Stopped`.
    """

    request_id: RequestKey
    target: RequestKey | None = None


class Expect(Value, frozen=True):
    """A `Submit` may follow: poll for it. Has no reply."""


class Shutdown(Value, frozen=True):
    """Exit with code 0 and finish no request."""


Command = Submit | Abort | Stop | HoldImage | DropImage | StopElsewhere | Expect | Shutdown


class ModelInfo(Value, frozen=True):
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
    adapters: bool = False  # whether requests may name adapters
    kv_dtype: str = ""  # of keys and values; empty without a KV cache
    kv_token_bytes: int = 0  # of KV cache per position


class Loading(Value, frozen=True):
    """Progress of the start; `fraction` in 0..1."""

    stage: str
    fraction: float


class Ready(Value, frozen=True):
    """The engine serves: weights are loaded and the model is warm."""

    model: ModelInfo
    pid: int


class PipelineStats(Value, frozen=True):
    """The engine's latest decode steps: medians in milliseconds over a sliding window.

    `telemetry.step_stats` fills it and defines each part. Unchanged while nothing decodes.
    """

    num_steps: int  # in the window
    num_tokens: int  # committed since the start, first tokens included
    rows: float  # mean rows of a step
    step_ms: float  # from commit to commit
    forward_ms: float
    sampling_ms: float  # the copy back included
    bookkeeping_ms: float  # host: plan, launch, finalize, commit
    wait_ms: float  # host, for the copy back
    idle_ms: float  # device
    blocking_ms: float  # estimated step of a blocking loop
    zombie_ratio: float  # of the rows
    predicted_gain: float  # over a blocking loop; 0.1 is 10 % more throughput
    tokens_per_row: float = 1.0  # committed by a step per row, zombies excluded
    proposed_per_row: float = 0.0  # draft tokens per such row
    acceptance: float = 0.0  # of the draft tokens


class KVCacheStats(Value, frozen=True):
    """Pages of the KV cache by state, and its counters since the engine started."""

    free: int
    idle: int  # cached prefixes without a reference, evictable
    shared: int  # cached and referenced by several requests
    draft: int  # allocated for draft tokens
    hit_rate: float  # of all prompt positions, those found in the cache
    fragmentation_ratio: float  # of all draft pages, those freed without an accepted token
    preemptions: int
    recomputed_tokens: int  # positions computed again after a preemption


class Load(Value, frozen=True):
    """The engine's current load.

    When idle, all are zero but `prefix_pages`, `images_cached`, `decode_steps` and `kv`.
    """

    running: int = 0
    waiting: int = 0
    inflight: int = 0  # launches not yet committed
    rows_used: int = 0
    pages_used: int = 0  # by live sequences, shared pages counted once
    prefix_pages: int = 0  # cached without a reference, evictable
    pages_total: int = 0
    adapters_used: int = 0  # adapter slots held by live sequences
    images_cached: int = 0
    decode_steps: PipelineStats | None = None  # None before the second decode step
    kv: KVCacheStats | None = None  # None without a KV cache


class Heartbeat(Value, frozen=True):
    """Sent every `heartbeat_interval` by a thread of its own, hence also during a long step.

    `step` counts committed launches; an engine with pending work whose `step` does not change is
    stuck.
    """

    step: int
    load: Load
    estimated_wait: float  # seconds that a new request would wait


class Queued(Value, frozen=True):
    """The request waits; `position` 0 is next."""

    request_id: RequestKey
    position: int
    estimated_wait: float


class Started(Value, frozen=True):
    """Prefill was launched."""

    request_id: RequestKey
    model: str
    input_tokens: int
    cached_tokens: int
    queue_time: float
    image: ImageInfo | None = None


class Delta(Value, frozen=True):
    """Events of one commit."""

    request_id: RequestKey
    events: tuple[Event, ...]


class Done(Value, frozen=True):
    """The whole result, which includes all deltas."""

    request_id: RequestKey
    result: TaskResult
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    image: ImageInfo | None = None
    tokens: tuple[TokenInfo, ...] = ()


class ImageHeld(Value, frozen=True):
    """An image is held until `until`, in `time.monotonic()` seconds."""

    request_id: RequestKey
    image: ImageInfo
    until: float


class ImageDropped(Value, frozen=True):
    """This owner's hold has ended."""

    request_id: RequestKey


class Failed(Value, frozen=True):
    """The request failed."""

    request_id: RequestKey
    error: ErrorValue


class Stopped(Value, frozen=True):
    """How many calls a `StopElsewhere` stopped; the parts of a call count once."""

    request_id: RequestKey
    count: int


EngineOutput = Queued | Started | Delta | Done | ImageHeld | ImageDropped | Failed
"""An output of one request or image command."""

FINAL = (Done, Failed, ImageHeld, ImageDropped)  # the last outputs of their request id

EngineMessage = Loading | Ready | Heartbeat | EngineOutput | Stopped

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_engine_message = msgspec.msgpack.Decoder(EngineMessage).decode
