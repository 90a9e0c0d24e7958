"""What an operator is told, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """What a decode step costs, over the engine's latest `steps`; times are medians.

    `tokens` are all that the engine has generated, `rows` the mean number of tasks in a step, of
    which the share `zombie_ratio` had ended before it. `blocking_ms` is the same step without
    pipelining, an estimate, and the gains are throughput over that: 0.1 is a tenth more, by the
    estimate and by the time that the steps took.
    """

    steps: int
    tokens: int
    rows: float
    step_ms: float
    forward_ms: float
    sampling_ms: float
    bookkeeping_ms: float
    wait_ms: float
    idle_ms: float
    blocking_ms: float
    zombie_ratio: float
    predicted_gain: float
    observed_gain: float


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What one engine of the server holds; the fields are those of `Load`.

    `step` counts the launches that it has ended, and `restarts` the engines that followed a lost
    one on its device. `pipeline_depth` is how many launches it may have in flight, 0 where it has
    no pipeline or the server does not tell.
    """

    device: str
    state: str
    running: int
    waiting: int
    kv_used_ratio: float
    estimated_wait: float | None
    step: int
    restarts: int
    decode_steps: DecodeSteps | None
    pipeline_depth: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """What the server holds: tasks that decode and that wait, open sessions, its caches' share.

    Figures are sums over its `engines`. `estimated_wait` is in seconds, where a request waits
    least, None where the server cannot tell. `engine_state` is "starting", "serving", "stuck",
    "draining" or "lost", that of the best engine; servers may add words. `decode_steps` is None
    with several engines.
    """

    running: int
    waiting: int
    sessions: int
    kv_used_ratio: float
    estimated_wait: float | None
    engine_state: str
    engine_step: int
    decode_steps: DecodeSteps | None
    engines: tuple[EngineLoad, ...] = ()


@dataclass(frozen=True, slots=True)
class AbortCount:
    """Requests that were stopped, and those of that name that had ended before."""

    aborted: int
    already_finished: int


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What a server that shuts down has left: tasks that decode, that wait, and sessions."""

    running: int
    waiting: int
    sessions: int


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """What a lane of the server's engine did for one launch.

    `start` and `duration` are in seconds, of the server's monotonic clock. `kind` is that of the
    launch, which has `rows` tasks and generated `tokens`. `riding` decodes share a prefill;
    `zombies` are tasks that had ended before. `engine` is the engine's index in `Load.engines`.
    """

    lane: str
    name: str
    start: float
    duration: float
    launch: int
    kind: str
    rows: int
    riding: int
    zombies: int
    engine: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class TimelineUpdate:
    """The launches that one engine ended since its update before, and what its decode steps cost.

    `engine_started` is in seconds of the server's monotonic clock; another value than before is an
    engine that follows a lost one. `lost_launches` are missing before these spans, because this
    client read too slowly. `pipeline_depth` is 1 for blocking and 2 for pipelined decoding, 0
    without a pipeline; `depth_switch` tells whether `set_pipeline_depth` is allowed. The first
    update has no spans, and 0 for the engine's start and depth.
    """

    spans: tuple[TimelineSpan, ...]
    decode_steps: DecodeSteps | None
    engine: int = 0
    engine_started: float = 0.0
    lost_launches: int = 0
    pipeline_depth: int = 0
    depth_switch: bool = False
