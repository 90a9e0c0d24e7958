"""All that crosses the line between a service process and an engine process.

Sockets carry these, msgpack-encoded: commands to the engine, reports from it. Reports
of one request come in order: `Queued`? `Started` `Delta`* then exactly one `Done` or `Failed`;
those before the last only when the request wants them. `HoldImage` and `DropImage` are answered
once, by `ImageHeld`, `ImageDropped` or `Failed`.
A request that was aborted gets no further report.
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
    """Forget this request; unknown ids are ignored."""

    request_id: RequestKey


class Stop(Value, frozen=True):
    """End this request now with what it has: its `Done` says CANCELLED. Unknown ids are ignored."""

    request_id: RequestKey


class HoldImage(Value, frozen=True):
    """Prepare a picture and hold it for `owner`, `ttl` seconds from when it is prepared."""

    request_id: RequestKey
    image: EncodedImage | RawImage
    owner: str
    ttl: float
    sha256: str = ""  # of the blob's bytes in hex; empty: not checked


class DropImage(Value, frozen=True):
    """End `owner`'s hold of a picture; one that nobody holds is forgotten."""

    request_id: RequestKey
    image_id: str
    owner: str


class StopElsewhere(Value, frozen=True):
    """`Stop` requests of the other service processes: all, or those that match `target`.

    Answered by `Stopped`.
    """

    request_id: RequestKey
    target: RequestKey | None = None


class Expect(Value, frozen=True):
    """A `Submit` is about to follow: be awake for it. Not answered, and harmless when none does."""


class Shutdown(Value, frozen=True):
    """Finish nothing, exit 0."""


Command = Submit | Abort | Stop | HoldImage | DropImage | StopElsewhere | Expect | Shutdown


class ModelInfo(Value, frozen=True):
    """What the engine serves; sent once in `Ready`."""

    name: str
    device: str
    tasks: tuple[str, ...]
    max_context_tokens: int
    max_output_tokens: int
    max_running: int
    max_waiting: int
    num_parameters: int
    dtype: str
    adapters: bool = False  # whether requests may name some
    kv_dtype: str = ""  # of keys and values, empty without a KV cache
    kv_token_bytes: int = 0  # of KV cache that a position takes


class Loading(Value, frozen=True):
    """Start-up progress, `fraction` in 0..1."""

    stage: str
    fraction: float


class Ready(Value, frozen=True):
    """Weights are loaded and the model is warm."""

    model: ModelInfo
    pid: int


class PipelineStats(Value, frozen=True):
    """The engine's latest decode steps: medians in milliseconds over a sliding window.

    `step_stats` fills it and says what each part is; it stays as it was while nothing decodes.
    """

    num_steps: int  # that the window holds
    num_tokens: int  # committed since the engine started, first tokens included
    rows: float  # mean rows of a step
    step_ms: float  # from commit to commit
    forward_ms: float
    sampling_ms: float  # the copy back included
    bookkeeping_ms: float  # host: plan, launch, finalize, commit
    wait_ms: float  # host, in front of the copy back
    idle_ms: float  # device
    blocking_ms: float  # the step as a blocking loop would run it, estimated
    zombie_ratio: float  # of the rows
    predicted_gain: float  # over a blocking loop; 0.1 is a tenth more throughput
    tokens_per_row: float = 1.0  # committed by a step for each row that is no zombie
    proposed_per_row: float = 0.0  # tokens that such a row proposed
    acceptance: float = 0.0  # of the proposed tokens


class KVCacheStats(Value, frozen=True):
    """Where the pages of the KV cache are, and its counters since the engine started."""

    free: int
    idle: int  # kept for whoever asks the same, evicted when needed
    shared: int  # of the cache's, those that several requests hold
    draft: int  # taken for what is only proposed
    hit_rate: float  # of all prompt positions, those found instead of computed
    fragmentation_ratio: float  # of all draft pages, those given back unaccepted
    preemptions: int
    recomputed_tokens: int  # positions computed again after a preemption


class Load(Value, frozen=True):
    """What the engine holds right now; all zero when idle.

    `prefix_pages`, `images_cached`, `decode_steps` and `kv` may stay.
    """

    running: int = 0
    waiting: int = 0
    inflight: int = 0  # launches not yet committed
    rows_used: int = 0
    pages_used: int = 0  # by live sequences, what they share counted once
    prefix_pages: int = 0  # kept of prompts and answers that nobody holds, evictable
    pages_total: int = 0
    adapters_used: int = 0  # adapter slots held by live sequences
    images_cached: int = 0
    decode_steps: PipelineStats | None = None  # None until one decode step has followed another
    kv: KVCacheStats | None = None  # None without a KV cache


class Heartbeat(Value, frozen=True):
    """Sent every `heartbeat_interval` by a thread of its own, so a long step does not hide life.

    `step` counts committed launches; pending work with a step that does not move is a stuck engine.
    """

    step: int
    load: Load
    estimated_wait: float  # seconds a request arriving now would wait


class Queued(Value, frozen=True):
    """The request had to wait; `position` 0 is next."""

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
    """What one commit added."""

    request_id: RequestKey
    events: tuple[Event, ...]


class Done(Value, frozen=True):
    """The whole result; repeats everything the deltas said."""

    request_id: RequestKey
    result: TaskResult
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    image: ImageInfo | None = None
    tokens: tuple[TokenInfo, ...] = ()


class ImageHeld(Value, frozen=True):
    """A picture is held until `until`, in `time.monotonic()` seconds."""

    request_id: RequestKey
    image: ImageInfo
    until: float


class ImageDropped(Value, frozen=True):
    """A picture is held no more, by this owner."""

    request_id: RequestKey


class Failed(Value, frozen=True):
    """The request failed; nothing follows."""

    request_id: RequestKey
    error: ErrorValue


class Stopped(Value, frozen=True):
    """How many requests a `StopElsewhere` stopped; several tasks of one call are one."""

    request_id: RequestKey
    count: int


EngineOutput = Queued | Started | Delta | Done | ImageHeld | ImageDropped | Failed
"""What concerns one request or picture."""

LAST = (Done, Failed, ImageHeld, ImageDropped)  # nothing more comes of what has its id

Report = Loading | Ready | Heartbeat | EngineOutput | Stopped

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
