"""The metrics of this process."""

from __future__ import annotations

import os
import platform
from collections.abc import Awaitable, Callable, Mapping

from legato_engine import log_sink

from legato_service.config import ServiceConfig
from legato_service.engines.group import EngineGroup
from legato_service.metrics import aliases, catalogue, engine, process_usage
from legato_service.metrics.calls import CallMetrics
from legato_service.metrics.catalogue import CALL_BOUNDS
from legato_service.metrics.exposition import Exposition, render
from legato_service.metrics.loop_lag import LoopLag
from legato_service.metrics.snapshot import Histogram, Snapshot
from legato_service.requests.registry import RequestRegistry
from legato_service.rpc.call_log import CallLog
from legato_service.session.registry import SessionRegistry
from legato_service.version import version


class Collector:
    """Collects this process's metrics, and writes those of all processes.

    The first process speaks for the engines. `number` is that of a worker, 0 of the first.
    `gather` adds the other processes' snapshots to this one's. `calls` is None when RPCs are not
    recorded.
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
        number: int = 0,
        gather: Callable[[Snapshot], Awaitable[Snapshot]] | None = None,
        reload_failures: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._config = config
        self._engines = engines
        self._requests = requests
        self._sessions = sessions
        self._calls = calls
        self._number = number
        self._gather = gather
        self._reload_failures = reload_failures
        self._frame_ages = Histogram(CALL_BOUNDS)
        self._lag = LoopLag(self._take_frame_ages)
        self._call_log = call_log

    def start(self) -> None:
        """Needs a running event loop."""
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
        if self._number == 0:
            self._write_build(snapshot)
            for each in self._engines.members:
                engine.write(snapshot, each)
                if each.pid:
                    process_usage.write(snapshot, f"engine-{each.number}", each.pid)
        return snapshot

    async def exposition(self, accept: str = "") -> Exposition:
        """Return the metrics of all processes; `accept` is as HTTP's header."""
        snapshot = self.snapshot()
        if self._gather is not None:
            snapshot = await self._gather(snapshot)
        metrics = [*catalogue.OWN]
        model = self._engines.model.name if self._engines.model is not None else ""
        if self._calls is not None:
            aliases.add_gen_ai(snapshot, model)
            metrics += catalogue.GEN_AI
        if self._config.vllm_metrics:
            aliases.add_vllm(snapshot, model, self._config.engine.page_size)
            metrics += catalogue.VLLM
        return await render(snapshot, metrics, accept)

    def _write_process(self, snapshot: Snapshot) -> None:
        totals = self._sessions.totals
        self._take_frame_ages()
        snapshot.add("legato_requests_in_flight", len(self._requests))
        snapshot.add("legato_requests_resumed", self._engines.resumptions)
        snapshot.add("legato_requests_poisoned", self._engines.num_poisoned)
        snapshot.add("legato_sessions_open", len(self._sessions))
        waiting = self._sessions.num_waiting_for_credits
        snapshot.add("legato_sessions_waiting_for_credits", waiting)
        snapshot.add("legato_session_frames", totals.frames)
        for reason, count in totals.dropped.items():
            snapshot.add("legato_session_frames_dropped", count, reason.name.lower())
        snapshot.add_histogram("legato_session_frame_age_seconds", self._frame_ages)
        snapshot.add_histogram("legato_event_loop_lag_seconds", self._lag.histogram)
        process = f"service-{self._number}"
        snapshot.add("legato_event_loop_longest_stall_seconds", self._lag.longest_stall, process)
        snapshot.add("legato_log_lines_dropped", log_sink.lines_dropped())
        for files, count in self._reload_failures().items():
            snapshot.add("legato_access_reload_failures", count, files)
        process_usage.write(snapshot, process, os.getpid())

    def _take_frame_ages(self) -> None:
        ages = self._sessions.totals.ages
        while ages:
            self._frame_ages.add(ages.popleft())

    def _write_build(self, snapshot: Snapshot) -> None:
        processes = str(self._config.processes)
        snapshot.add("legato_build", 1, version(), platform.python_version(), processes)
