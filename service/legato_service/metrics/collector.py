"""Collection of a process's metrics."""

from __future__ import annotations

import asyncio
import math
import os
import platform
import time
from collections.abc import Callable, Mapping

from legato_engine import log_sink
from legato_engine.client.connection import EngineConnection
from legato_engine.client.monitor import EngineState
from legato_engine.ipc.messages import PipelineStats, SchedulerLoad, StepTotals
from prometheus_client import ProcessCollector

from legato_service.config import ServiceConfig
from legato_service.engines.group import EngineGroup
from legato_service.lifecycle import Peers
from legato_service.metrics import catalogue
from legato_service.metrics.calls import CallMetrics
from legato_service.metrics.catalogue import CALL_BOUNDS, LAG_BOUNDS
from legato_service.metrics.snapshot import (
    Exposition,
    Histogram,
    Snapshot,
    add_gen_ai,
    add_vllm,
    render,
)
from legato_service.requests.registry import RequestRegistry
from legato_service.rpc.call_log import CallLog
from legato_service.session.session import SessionRegistry
from legato_service.version import version

_KINDS = ("encode", "prefill", "decode", "refine")
_PARTS = ("forward", "sampling", "bookkeeping", "wait", "idle", "blocking", "mask", "step")


def write_engine(snapshot: Snapshot, engine: EngineConnection) -> None:
    """Write an engine's metrics; its counters restart with each engine process."""
    number = str(engine.number)
    for state in EngineState:
        snapshot.add("legato_engine_state", float(engine.state is state), number, state.value)
    snapshot.add("legato_engine_restarts", engine.restarts, number)
    age = time.monotonic() - engine.last_heartbeat
    snapshot.add("legato_engine_heartbeat_age_seconds", max(0.0, age), number)
    snapshot.add("legato_engine_estimated_wait_seconds", engine.estimated_wait, number)
    snapshot.add("legato_engine_steps", engine.step, number)
    model = engine.model
    if model is not None:
        labels = (model.name, model.device, model.dtype, model.kv_dtype)
        snapshot.add("legato_model", 1, number, *labels)
        snapshot.add("legato_engine_requests_limit", model.max_running, number)
        snapshot.add("legato_engine_queue_limit", model.max_waiting, number)
    _write_load(snapshot, engine.load, number)
    _write_steps(snapshot, engine.step_totals, number)
    _write_decode_steps(snapshot, engine.load.decode_steps, number)
    images = engine.image_totals
    snapshot.add("legato_images_decoded", images.decoded, number)
    snapshot.add("legato_image_cache_hits", images.found, number)
    snapshot.add("legato_image_cache_queries", images.found + images.decoded, number)
    snapshot.add("legato_image_cache_bytes", images.cached_bytes, number)
    snapshot.add("legato_image_held_bytes", images.held_bytes, number)


def _write_load(snapshot: Snapshot, load: SchedulerLoad, number: str) -> None:
    snapshot.add("legato_engine_requests_running", load.running, number)
    snapshot.add("legato_engine_requests_waiting", load.waiting, number)
    snapshot.add("legato_engine_launches_in_flight", load.inflight, number)
    snapshot.add("legato_kv_pages_used", load.pages_used, number)
    snapshot.add("legato_kv_pages_cached", load.prefix_pages, number)
    snapshot.add("legato_kv_pages_limit", load.pages_total, number)
    snapshot.add("legato_adapter_slots_used", load.adapters_used, number)
    snapshot.add("legato_images_cached", load.images_cached, number)
    kv = load.kv
    found = kv.found_tokens if kv else 0
    snapshot.add("legato_prefix_cache_hits", found, number)
    snapshot.add("legato_prefix_cache_queries", found + (kv.computed_tokens if kv else 0), number)
    snapshot.add("legato_preemptions", kv.preemptions if kv else 0, number)
    snapshot.add("legato_recomputed_tokens", kv.recomputed_tokens if kv else 0, number)


def _write_steps(snapshot: Snapshot, totals: StepTotals, number: str) -> None:
    for kind in _KINDS:
        snapshot.add("legato_engine_launches", totals.launches.get(kind, 0), number, kind)
    snapshot.add("legato_engine_tokens", totals.tokens, number)
    snapshot.add_histogram("legato_engine_step_seconds", totals.step_times, number)
    snapshot.add_histogram("legato_inter_token_seconds", totals.token_gaps, number)
    snapshot.add("legato_engine_decode_seconds", totals.decode_seconds, number)
    snapshot.add("legato_engine_device_idle_seconds", totals.idle_seconds, number)
    snapshot.add("legato_forced_tokens", totals.forced, number)
    snapshot.add("legato_draft_tokens", totals.drafted, number)
    snapshot.add("legato_draft_tokens_accepted", totals.accepted, number)
    for size, count in totals.blocks.items():
        snapshot.add("legato_draft_blocks", count, number, str(size))


def _write_decode_steps(snapshot: Snapshot, steps: PipelineStats | None, number: str) -> None:
    for part in _PARTS:
        milliseconds = getattr(steps, f"{part}_ms") if steps else 0.0
        snapshot.add("legato_engine_step_part_seconds", milliseconds / 1000, number, part)
    snapshot.add("legato_engine_batch_rows", steps.rows if steps else 0.0, number)
    predicted = steps.predicted_gain if steps else 0.0
    snapshot.add("legato_pipeline_predicted_gain_ratio", predicted, number)
    observed = steps.observed_gain if steps else 0.0
    snapshot.add("legato_pipeline_observed_gain_ratio", observed, number)


# ---------------------------------------------------------------- process usage

_USAGE = (
    "legato_process_resident_memory_bytes",
    "legato_process_cpu_seconds",
    "legato_process_open_fds",
)


def write_process_usage(snapshot: Snapshot, name: str, pid: int) -> None:
    """Write what the kernel tells of a process; nothing if there is none."""
    for family in ProcessCollector("legato", lambda: pid, registry=None).collect():
        if family.name in _USAGE:
            snapshot.add(family.name, family.samples[0].value, name)


# ---------------------------------------------------------------- loop lag

PERIOD = 0.02  # seconds: short enough to notice a stall of 50 ms
WINDOW = 30.0  # seconds


class LoopLag:
    """Measurement of how late a timer runs. `tick` is called each time."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self.histogram = Histogram(LAG_BOUNDS)
        self._tick = tick
        self._timer: asyncio.TimerHandle | None = None
        self._longest = self._longest_before = 0.0  # of this window and the previous one
        self._window_ends = -math.inf

    @property
    def longest_stall(self) -> float:
        """Seconds of the longest stall of the last half to whole minute, less up to `PERIOD`."""
        return max(self._longest, self._longest_before)

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + PERIOD
        self._timer = loop.call_at(due, self._measure, loop, due)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _measure(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = loop.time()
        lag = max(0.0, now - due)
        if now >= self._window_ends:
            is_next = now < self._window_ends + WINDOW
            self._longest_before = self._longest if is_next else 0.0
            self._longest = 0.0
            self._window_ends = now + WINDOW
        self._longest = max(self._longest, lag)
        self.histogram.add(lag)
        self._tick()
        self.start()


# ---------------------------------------------------------------- collector


class Collector:
    """Collector of this process's metrics, and writer of those of all processes.

    The first process speaks for the engines. `calls` is None when RPCs are not recorded.
    """

    def __init__(
        self,
        config: ServiceConfig,
        engines: EngineGroup,
        requests: RequestRegistry,
        sessions: SessionRegistry,
        calls: CallMetrics | None,
        call_log: CallLog,
        *,
        peers: Peers,
        reload_failures: Callable[[], Mapping[str, int]],
    ) -> None:
        self._config = config
        self._engines = engines
        self._requests = requests
        self._sessions = sessions
        self._calls = calls
        self._peers = peers
        self._reload_failures = reload_failures
        self._frame_ages = Histogram(CALL_BOUNDS)
        self._lag = LoopLag(self._take_frame_ages)
        self._call_log = call_log

    def start(self) -> None:
        """Start measuring; needs a running event loop."""
        if self._calls is not None:
            self._lag.start()

    def close(self) -> None:
        self._lag.close()

    def snapshot(self) -> Snapshot:
        snapshot = Snapshot()
        if self._calls is not None:
            self._call_log.flush()
            self._calls.write(snapshot, self._call_log.starts or {})
        self._write_process(snapshot)
        if self._peers.number == 0:
            processes = str(self._config.processes)
            snapshot.add("legato_build", 1, version(), platform.python_version(), processes)
            for each in self._engines.members:
                write_engine(snapshot, each)
                if each.pid:
                    write_process_usage(snapshot, f"engine-{each.number}", each.pid)
        return snapshot

    async def exposition(self, accept: str = "") -> Exposition:
        """Return the metrics of all processes; `accept` is as HTTP's header."""
        snapshot = await self._peers.gather(self.snapshot())
        metrics = [*catalogue.OWN]
        model = self._engines.model.name if self._engines.model is not None else ""
        if self._calls is not None:
            add_gen_ai(snapshot, model)
            metrics += catalogue.GEN_AI
        if self._config.vllm_metrics:
            add_vllm(snapshot, model, self._config.engine.page_size)
            metrics += catalogue.VLLM
        return await render(snapshot, metrics, accept)

    def _write_process(self, snapshot: Snapshot) -> None:
        engines, totals = self._engines.members, self._sessions.totals
        self._take_frame_ages()
        snapshot.add("legato_requests_in_flight", len(self._requests))
        snapshot.add("legato_requests_resumed", sum(each.resumptions for each in engines))
        snapshot.add("legato_requests_poisoned", sum(each.num_poisoned for each in engines))
        snapshot.add("legato_sessions_open", len(self._sessions))
        waiting = self._sessions.num_waiting_for_credits
        snapshot.add("legato_sessions_waiting_for_credits", waiting)
        snapshot.add("legato_session_frames", totals.frames)
        for reason, count in totals.dropped.items():
            snapshot.add("legato_session_frames_dropped", count, reason.name.lower())
        snapshot.add_histogram("legato_session_frame_age_seconds", self._frame_ages)
        snapshot.add_histogram("legato_event_loop_lag_seconds", self._lag.histogram)
        process = f"service-{self._peers.number}"
        snapshot.add("legato_event_loop_longest_stall_seconds", self._lag.longest_stall, process)
        snapshot.add("legato_log_lines_dropped", log_sink.lines_dropped())
        for files, count in self._reload_failures().items():
            snapshot.add("legato_access_reload_failures", count, files)
        write_process_usage(snapshot, process, os.getpid())

    def _take_frame_ages(self) -> None:
        ages = self._sessions.totals.ages
        while ages:
            self._frame_ages.add(ages.popleft())
