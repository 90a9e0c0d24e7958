"""What an operator is told, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """What a decode step costs: medians in milliseconds over the engine's latest `steps`."""

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
class Load:
    """What the engine holds: tasks that decode and that wait, open sessions, its cache's share.

    `estimated_wait` is in seconds, None where the server cannot tell. `engine_state` is "starting",
    "serving", "stuck", "draining" or "lost"; servers may add words.
    """

    running: int
    waiting: int
    sessions: int
    kv_used_ratio: float
    estimated_wait: float | None
    engine_state: str
    engine_step: int
    decode_steps: DecodeSteps | None


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
    launch. `riding` decodes share a prefill; `zombies` are tasks that had ended before.
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


@dataclass(frozen=True, slots=True)
class TimelineUpdate:
    """The launches that ended since the update before, and what decode steps cost."""

    spans: tuple[TimelineSpan, ...]
    decode_steps: DecodeSteps | None
