"""Server information, sessions and admin values."""

from __future__ import annotations

import dataclasses
import datetime
from dataclasses import dataclass
from typing import Any, Literal

from legato_client._errors import ClientTooOld, LegatoError, SharedMemoryRefused
from legato_client._types.results import Event, FrameStamp, ImageInfo, Result
from legato_client._version import CONTRACT_REVISION


@dataclass(frozen=True, slots=True)
class Limits:
    """Server limits; `default_deadline` is in seconds, 0 when it has none."""

    max_request_bytes: int
    max_image_pixels: int
    max_context_tokens: int
    max_output_tokens: int
    max_running: int
    max_waiting: int
    max_sessions: int
    default_deadline: float


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Identity, contract revision and limits of a server.

    `shm_namespace` names its host's shared memory; empty where it reads none.
    """

    name: str
    version: str
    instance_id: str
    contract_revision: int
    minimum_client_revision: int
    limits: Limits
    capabilities: tuple[str, ...]
    shm_namespace: str = ""


@dataclass(frozen=True, slots=True)
class ConfidenceInfo:
    """Tasks whose results have a confidence, and those of them whose confidences were fitted.

    The others order objects and say no more. `fitted_on` is empty and `fitted_at` None where there
    is no calibration.
    """

    tasks: tuple[str, ...]
    calibrated_tasks: tuple[str, ...] = ()
    fitted_on: str = ""
    fitted_at: datetime.datetime | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model and what it can do.

    `confidence` is None where no result has one. `notice` tells people the model's limits, once
    beside its answers; empty: there is nothing to say. A query takes up to `max_images`.
    """

    name: str
    aliases: tuple[str, ...]
    tasks: tuple[str, ...]
    streaming_regions: bool
    max_context_tokens: int
    confidence: ConfidenceInfo | None = None
    notice: str = ""
    max_images: int = 1


def model_document(model: ModelInfo) -> dict[str, Any]:
    """Return the fields as JSON values, the time in ISO 8601."""
    document = dataclasses.asdict(model)
    if model.confidence is not None and model.confidence.fitted_at is not None:
        document["confidence"]["fitted_at"] = model.confidence.fitted_at.isoformat()
    return document


UNKNOWN = ServerInfo("", "", "", 0, 0, Limits(0, 0, 0, 0, 0, 0, 0, 0.0), ())
"""Placeholder for servers without GetServerInfo."""


def check_client(info: ServerInfo) -> None:
    """Raise ClientTooOld if the server no longer accepts this contract revision."""
    if info.minimum_client_revision > CONTRACT_REVISION:
        raise ClientTooOld(
            f"the server needs clients of contract revision {info.minimum_client_revision} or "
            f"newer, this one knows {CONTRACT_REVISION}: upgrade the package legato",
            metadata={
                "limit": str(info.minimum_client_revision),
                "actual": str(CONTRACT_REVISION),
            },
        )


def check_shared_memory(info: ServerInfo, own_namespace: str) -> None:
    """Raise SharedMemoryRefused where the server cannot read this host's shared memory."""
    if info.shm_namespace == own_namespace:
        return
    if info.shm_namespace:
        why = f"the server's shared memory is {info.shm_namespace}, this host's is {own_namespace}"
    else:
        why = "the server reads no shared memory"
    raise SharedMemoryRefused(f"{why}: send the bytes", reason="SHM_REFUSED")


# ---------------------------------------------------------------- session

FramePolicy = Literal["latest_wins", "every_frame", "preempt"]


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """Terms that the server granted; `heartbeat_interval` is in seconds.

    `session_id` is the server's name for the session, `max_in_flight` how many frames it works on
    at a time.
    """

    session_id: str
    model: str
    max_in_flight: int
    heartbeat_interval: float


@dataclass(frozen=True, slots=True)
class FrameResult:
    """Outcome of one task on one frame; `stamp` is the frame's, unchanged.

    `age` is how many seconds after the frame's capture the server sent this; None: not said.
    """

    stamp: FrameStamp
    task_id: str
    outcome: Result | LegatoError
    image: ImageInfo | None
    last_for_frame: bool
    age: float | None = None

    @property
    def sequence(self) -> int:
        """The frame, as `send` named it."""
        return self.stamp.sequence

    @property
    def result(self) -> Result:
        """The result; raises the error of a task that failed."""
        if isinstance(self.outcome, LegatoError):
            raise self.outcome
        return self.outcome


@dataclass(frozen=True, slots=True)
class FrameDropped:
    """The frame gets no results.

    `reason` is "superseded", "too_old", "overloaded", "cancelled", "going_away", or "unspecified"
    for one this client does not know. `dropped_total` counts since the session opened.
    """

    sequence: int
    reason: str
    dropped_total: int


@dataclass(frozen=True, slots=True)
class FrameDelta:
    """An event of a task that runs, as `generate` has them; the `FrameResult` is its end."""

    sequence: int
    task_id: str
    event: Event


@dataclass(frozen=True, slots=True)
class GoAway:
    """The server will end the session in `time_left` seconds: open another one elsewhere.

    `reason` is None where the session merely reached its greatest age.
    """

    time_left: float
    reason: LegatoError | None


Answer = FrameResult | FrameDropped | FrameDelta | GoAway


@dataclass(frozen=True, slots=True)
class SessionStats:
    """Frames so far: `sent` is `answered` + `dropped` + those still open.

    `skipped` counts frames that were never sent, for want of a credit; `too_old` is part of
    `dropped`. `response_time` in seconds is measured once frames are too old in a row.
    """

    sent: int = 0
    answered: int = 0
    dropped: int = 0
    skipped: int = 0
    too_old: int = 0
    response_time: float | None = None


# ---------------------------------------------------------------- admin


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """Cost of a decode step over the engine's latest `steps`; times are medians.

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
    mask_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of one engine; the fields are those of `Load`.

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
    """Load of the server: running and waiting tasks, open sessions, cache usage.

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
    """Work left in a server that shuts down: running and waiting tasks, sessions."""

    running: int
    waiting: int
    sessions: int


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """Span of one launch in a lane of the engine's timeline.

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
