"""The service processes beside the first, as the first runs them."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import structlog
from legato_engine.client.engine_client import EngineClient
from legato_engine.client.supervisor import Backoff, ChildProcess
from legato_engine.core import RequestKey
from legato_engine.shm.blob_store import BlobStore

from legato_service.config import ServiceConfig
from legato_service.lifecycle.peers import abort_elsewhere
from legato_service.workers.control_channel import Leave, Line, Serving
from legato_service.workers.worker import Settings

log = structlog.get_logger("legato.service")

_MODULE = "legato_service.workers.worker"


class WorkerProcesses:
    """Starts them, starts again those that die, and takes them along when the server leaves.

    What a dead one left in shared memory is removed here; its requests, the engine forgets itself.
    To the first process's server these are the `Peers`; `drain_first` has it drain.
    """

    is_first = True

    def __init__(
        self, config: ServiceConfig, engine: EngineClient, drain_first: Callable[[float], None]
    ) -> None:
        self._engine = engine
        self._drain_first = drain_first
        self._settings = [
            Settings(
                config=config,
                number=number,
                endpoint=engine.endpoint,
                namespace=f"{engine.blobs.namespace}-{number}",
            )
            for number in range(1, config.processes)
        ]
        self._leaving = asyncio.Event()
        self._leave_by = math.inf  # monotonic seconds
        self._lines: dict[int, Line] = {}  # by number, of those that run
        self._unheard = {each.number for each in self._settings}
        self._tasks: list[asyncio.Task[None]] = []
        self.failed_starts = 0  # of processes that died before one of their number ever served

    @property
    def ready(self) -> bool:
        """Whether each has served."""
        return not self._unheard

    def start(self) -> None:
        """Start all, without waiting."""
        self._tasks = [asyncio.create_task(self._keep(each)) for each in self._settings]

    def drain(self, grace: float) -> None:
        """Have all drain, the first process included. Doing so again only shortens the grace."""
        self._leave_by = min(self._leave_by, time.monotonic() + grace)
        self._leaving.set()
        self._drain_first(grace)
        for line in self._lines.values():
            line.send(Leave(grace=grace))

    async def abort(self, target: RequestKey | None) -> int:
        """Stop what they have of this id, or all they have; how many requests."""
        return await abort_elsewhere(self._engine, target) if self._settings else 0

    async def left(self, within: float | None = None) -> bool:
        """Wait until all have left, at most so many seconds; whether they did."""
        if not self._tasks:
            return True
        _, pending = await asyncio.wait(self._tasks, timeout=within)
        return not pending

    async def close(self) -> None:
        """Kill those that are left. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, settings: Settings) -> None:
        """One after the other under this number, until the server leaves."""
        backoff = Backoff(first=0.25, cap=30.0, stable=60.0)
        while not self._leaving.is_set():
            began = time.monotonic()
            try:
                code = await self._run_once(settings)
            finally:
                BlobStore(settings.namespace).close()
            if self._leaving.is_set():
                return
            self.failed_starts += settings.number in self._unheard
            delay = backoff.delay_after(time.monotonic() - began)
            log.error("process_lost", number=settings.number, exit_code=code, restart_in=delay)
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._leaving.wait()

    async def _run_once(self, settings: Settings) -> int:
        """From spawn to exit; killed when this is cancelled."""
        ours, theirs = socket.socketpair()
        line = await Line.over(ours)
        listening = asyncio.create_task(self._listen(settings.number, line))
        process: ChildProcess | None = None
        try:
            with theirs:
                process = await ChildProcess.spawn(_command(settings, theirs), (theirs.fileno(),))
            self._lines[settings.number] = line
            if self._leaving.is_set():  # while it was being started
                line.send(Leave(grace=max(0.0, self._leave_by - time.monotonic())))
            return await process.wait()
        except OSError as error:
            log.error("process_cannot_be_started", error=str(error))
            return 127
        finally:
            self._lines.pop(settings.number, None)
            if process is not None:
                process.kill()
            listening.cancel()
            line.close()

    async def _listen(self, number: int, line: Line) -> None:
        while (note := await line.receive()) is not None:
            match note:
                case Serving():
                    self._unheard.discard(number)
                case Leave(grace=grace):
                    self.drain(grace)


def _command(settings: Settings, line: socket.socket) -> list[str]:
    return [
        *(sys.executable, "-m", _MODULE),
        *("--settings", msgspec.json.encode(settings).decode()),
        *("--line", str(line.fileno())),
        *("--latency-policy", settings.config.engine.latency_policy),
        *("--parent", str(os.getpid())),
    ]
