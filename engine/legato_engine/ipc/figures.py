"""Figures in an engine's heartbeats: its load, its caches, and what it did since its start."""

from __future__ import annotations

import msgspec

from legato_engine.core.value import Value


class PipelineStats(Value, frozen=True):
    """Medians over a window of decode steps; `telemetry.step_stats` defines them."""

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
    tokens_per_row: float = 1.0  # committed, without zombies
    proposed_per_row: float = 0.0  # draft tokens per such row
    acceptance: float = 0.0  # of the draft tokens
    observed_gain: float = 0.0  # as predicted_gain, of the elapsed time instead of medians


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
    0.0005,
    0.001,
    0.002,
    0.003,
    0.004,
    0.006,
    0.008,
    0.012,
    0.016,
    0.024,
    0.032,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    5.0,
)
"""Upper bounds of the bins of an engine's `Durations`; one more bin has what is above."""


class Durations(msgspec.Struct, frozen=True, array_like=True):
    """A histogram of seconds since the start."""

    counts: tuple[int, ...] = (0,) * (len(SECONDS_BOUNDS) + 1)
    total: float = 0.0  # seconds


class StepTotals(msgspec.Struct, frozen=True, array_like=True):
    """What the engine's launches did since its start.

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
    blocks: dict[int, int] = {}  # rows with draft tokens, by their number


class ImageTotals(msgspec.Struct, frozen=True, array_like=True):
    """Images of the engine: counts since its start, and bytes."""

    decoded: int = 0
    found: int = 0  # in the cache
    cached_bytes: int = 0
    held_bytes: int = 0


class Load(Value, frozen=True):
    """The engine's current load."""

    running: int = 0
    waiting: int = 0
    preparing: int = 0  # of those waiting: image or adapter is being prepared, so no step is due
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
        """Whether there is work that a step must take on."""
        return self.running + self.waiting - self.preparing + self.inflight > 0
