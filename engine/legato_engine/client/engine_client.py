"""The connection of the first service process, which runs the engine process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Sequence

import msgspec
import structlog

from legato_engine.client.connection import EngineConnection
from legato_engine.client.monitor import EngineState
from legato_engine.client.supervisor import EXIT_UNSERVABLE, Backoff, ChildProcess
from legato_engine.config import EngineConfig
from legato_engine.errors import EngineLost
from legato_engine.ipc import latency_policy
from legato_engine.ipc.messages import Heartbeat, Loading, Ready, Shutdown
from legato_engine.ipc.transport import ListeningSockets
from legato_engine.shm.blob_store import new_namespace

__all__ = ["EngineClient", "EngineLimits", "EngineState"]

_SHUTDOWN_GRACE = 2.0  # seconds for an engine to exit by itself
_log = structlog.get_logger()


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds after which a hanging engine is aborted, and a dead one restarted.

    An engine is aborted after `silence` without a heartbeat, or `stuck` without a step while work
    is pending. While it loads, `loading` replaces `silence`, because importing from a slow disk
    blocks its interpreter.
    """

    silence: float = 10.0
    loading: float = 60.0
    stuck: float = 60.0
    backoff_first: float = 0.25
    backoff_cap: float = 30.0
    stable: float = 60.0


class EngineClient(EngineConnection):
    """Runs the engine process, restarts it when it dies, and stays connected to it.

    Other service processes connect with `EngineConnection` at `endpoint`; their blobs' namespaces
    begin with that of `blobs`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        limits: EngineLimits | None = None,
        command: Sequence[str] = (sys.executable, "-m", "legato_engine.engine.process"),
    ) -> None:
        super().__init__(new_namespace(), latency_policy.resolve(config.latency_policy))
        self._config = config
        self._limits = limits or EngineLimits()
        self._command = tuple(command)
        self._backoff = Backoff(
            first=self._limits.backoff_first,
            cap=self._limits.backoff_cap,
            stable=self._limits.stable,
        )
        self._listeners = ListeningSockets()
        self._process: ChildProcess | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._step_moved = 0.0
        self._ready_at = 0.0
        self.unservable = False

    @property
    def endpoint(self) -> str:
        return self._listeners.endpoint

    # ------------------------------------------------------------ lifecycle

    async def start(self) -> None:
        """Start the engine process and its supervision; does not wait for `READY`."""
        self._supervision = asyncio.create_task(self._supervise(), name="engine-supervision")

    async def close(self) -> None:
        """Stop the engine; open streams fail with `Draining`. Idempotent."""
        self._send(Shutdown())
        await super().close()
        process = self._process
        if process is not None:
            await process.wait_at_most(_SHUTDOWN_GRACE)
            process.kill()
        if self._supervision is not None:
            self._supervision.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervision
        self._listeners.close()

    # ------------------------------------------------------------ messages

    def _on_heartbeat(self, beat: Heartbeat) -> None:
        if not beat.load.has_steps or beat.step != self.step:
            self._step_moved = time.monotonic()
        super()._on_heartbeat(beat)

    def _on_ready(self, ready: Ready) -> None:
        self._ready_at = self._step_moved = time.monotonic()
        super()._on_ready(ready)

    # ------------------------------------------------------------ supervision

    async def _supervise(self) -> None:
        while True:
            code = await self._run_once()
            uptime = time.monotonic() - self._ready_at if self._ready_at else 0.0
            self._ready_at = 0.0
            self._lose(EngineLost("the engine process died", exit_code=code))
            if code == EXIT_UNSERVABLE:
                self.unservable = True
                self._fail_open(EngineLost("the engine cannot be started again"))
                return
            if self.state is EngineState.LOST:
                delay = self._backoff.delay_after(uptime)
                _log.error("engine_lost", exit_code=code, uptime=round(uptime, 3), restart_in=delay)
                await asyncio.sleep(delay)
            if self.state is not EngineState.LOST:
                return
            self.restarts += 1
            self.progress = Loading(stage="start", fraction=0.0)
            self._set_state(EngineState.STARTING)

    async def _run_once(self) -> int:
        self._disconnect()  # else rejecting pending connections would end this one, too
        self._listeners.reject_pending()
        self.connect(self.endpoint)
        self._step_moved = time.monotonic()
        watchdog: asyncio.Task[None] | None = None
        try:
            self._process = await ChildProcess.spawn(self._arguments(), self._listeners.filenos)
            watchdog = asyncio.create_task(self._watch(self._process))
            return await self._process.wait()
        except OSError as error:
            _log.error("engine_start_failed", error=str(error))
            return 127
        finally:
            if watchdog is not None:
                watchdog.cancel()
            if self._process is not None:
                self._process.kill()
            self._process = None

    def _arguments(self) -> list[str]:
        return [
            *self._command,
            *("--config", msgspec.json.encode(self._config).decode()),
            *("--listeners", *map(str, self._listeners.filenos)),
            *("--namespace", self.blobs.namespace),
            *("--parent", str(os.getpid())),
        ]

    async def _watch(self, process: ChildProcess) -> None:
        while True:
            await asyncio.sleep(self._config.heartbeat_interval)
            now = time.monotonic()
            limit = self._limits.silence if self._ready_at else self._limits.loading
            silent = now - self.last_heartbeat > limit
            stuck = bool(self._ready_at) and now - self._step_moved > self._limits.stuck
            if silent or stuck:
                _log.error("engine_hung", silent=silent, stuck=stuck, step=self.step)
                await process.abort()
                return
