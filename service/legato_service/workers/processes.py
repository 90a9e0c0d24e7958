"""Worker processes and the port they share."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import msgspec
import structlog
from legato_engine.client.engine_client import (
    SERVED_AFTER,
    ChildProcess,
    EngineClient,
    RestartBackoff,
)
from legato_engine.shm import BlobStore
from legato_engine.types import RequestKey

from legato_service.config import ServiceConfig
from legato_service.lifecycle import abort_elsewhere
from legato_service.metrics.snapshot import Snapshot, merged
from legato_service.workers.control_channel import (
    Collect,
    Collected,
    ControlChannel,
    DrainCommand,
    MetricsExchange,
    Serving,
    WithdrawCommand,
    WorkerMetrics,
)
from legato_service.workers.worker import EngineEndpoint, WorkerSettings

_NOT_HERE = (
    errno.EADDRNOTAVAIL,
    errno.EAFNOSUPPORT,
)  # address families that this host lacks


@contextmanager
def reserved(listen: str) -> Iterator[str]:
    """Hold `listen` (host:port) for the length of the block; yield it with the port's number.

    SO_REUSEPORT alone would let this server join another one that set it. So the port is first
    bound without it, which fails when it is in use, and then opened to this server's processes.

    Raises:
        OSError: the address is in use or does not exist.
    """
    host, _, port_text = listen.rpartition(":")
    port = int(port_text)
    with ExitStack() as held:
        missing: OSError | None = None
        for family, address in _addresses(host.strip("[]")):
            holder = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            try:
                port = _hold(holder, address, port)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                missing = error
        if not port and missing is not None:
            raise missing
        yield f"{host}:{port}"


def _hold(holder: socket.socket, address: str, port: int) -> int:
    # Connections in TIME_WAIT do not prevent the bind.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, port))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return int(holder.getsockname()[1])


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


# ---------------------------------------------------------------- processes

log = structlog.get_logger("legato.service")

_MODULE = "legato_service.workers.worker"


class WorkerProcesses:
    """Worker processes: started, restarted when they die, and drained with the server.

    Removes what a dead worker left in shared memory; the engines abort its requests themselves. The
    `Peers` of the first process's server, which `drain_first` drains and whose own metrics
    `snapshot_first` returns.
    """

    number = 0

    def __init__(
        self,
        config: ServiceConfig,
        engines: Sequence[EngineClient],
        drain_first: Callable[[float], None],
        snapshot_first: Callable[[], Snapshot],
    ) -> None:
        self._engines = engines
        self._drain_first = drain_first
        self._snapshot_first = snapshot_first
        self._metrics = WorkerMetrics()
        self._settings = [
            WorkerSettings(
                config=config,
                number=number,
                engines=tuple(_endpoint(each, number) for each in engines),
            )
            for number in range(1, config.processes)
        ]
        self._withdrawn = False
        self._draining = asyncio.Event()
        self._drain_until = math.inf  # monotonic seconds
        self._channels: dict[int, ControlChannel] = {}  # by number of a running worker
        self._not_ready = {each.number for each in self._settings}
        self._serving_since: dict[int, float] = {}  # monotonic seconds, of running workers
        self._tasks: list[asyncio.Task[None]] = []
        self.failed_starts = 0  # deaths of workers before one of the same number ever served

    @property
    def is_ready(self) -> bool:
        return not self._not_ready

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(each)) for each in self._settings]

    def withdraw(self) -> None:
        """Withdraw the workers from service, including those that start later."""
        self._withdrawn = True
        for channel in self._channels.values():
            channel.send(WithdrawCommand())

    def drain(self, grace: float) -> None:
        """Drain all processes, the first included; a repeated call only shortens the grace."""
        self._drain_until = min(self._drain_until, time.monotonic() + grace)
        self._draining.set()
        self._drain_first(grace)
        for channel in self._channels.values():
            channel.send(DrainCommand(grace=grace))

    async def abort(self, target: RequestKey | None) -> int:
        return await abort_elsewhere(self._engines, target) if self._settings else 0

    async def gather(self, own: Snapshot) -> Snapshot:
        return merged((own, await self._metrics.gather())) if self._settings else own

    async def _snapshot_all(self) -> Snapshot:
        return await self.gather(self._snapshot_first())

    async def wait_exited(self, within: float | None = None) -> bool:
        """Wait `within` seconds at most; return whether all have exited."""
        if not self._tasks:
            return True
        _, pending = await asyncio.wait(self._tasks, timeout=within)
        return not pending

    async def close(self) -> None:
        """Kill the remaining workers. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, settings: WorkerSettings) -> None:
        backoff = RestartBackoff(first=0.25, cap=30.0, ready_cap=1.0)
        while not self._draining.is_set():
            self._serving_since.pop(settings.number, None)
            try:
                code = await self._run_once(settings)
            finally:
                for each in settings.engines:
                    BlobStore(each.namespace).close()
            if self._draining.is_set():
                return
            self.failed_starts += settings.number in self._not_ready
            since = self._serving_since.get(settings.number, math.inf)
            served = time.monotonic() - since >= SERVED_AFTER
            delay = backoff.delay(ready=since < math.inf, served=served)
            log.error("worker_lost", number=settings.number, exit_code=code, restart_in=delay)
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._draining.wait()

    async def _run_once(self, settings: WorkerSettings) -> int:
        """Return a worker's exit code; cancellation kills it."""
        ours, theirs = socket.socketpair()
        channel = await ControlChannel.from_socket(ours)
        exchange = MetricsExchange(channel, self._snapshot_all)
        listening = asyncio.create_task(self._listen(settings.number, channel, exchange))
        process: ChildProcess | None = None
        try:
            with theirs:
                process = await ChildProcess.spawn(_command(settings, theirs), (theirs.fileno(),))
            self._channels[settings.number] = channel
            if self._withdrawn:
                channel.send(WithdrawCommand())
            if self._draining.is_set():  # since it was spawned
                channel.send(DrainCommand(grace=max(0.0, self._drain_until - time.monotonic())))
            return await process.wait()
        except OSError as error:
            log.error("worker_start_failed", error=str(error))
            return 127
        finally:
            self._channels.pop(settings.number, None)
            self._metrics.remove(settings.number)
            if process is not None:
                process.kill()
            listening.cancel()
            channel.close()

    async def _listen(
        self, number: int, channel: ControlChannel, exchange: MetricsExchange
    ) -> None:
        while (message := await channel.receive()) is not None:
            match message:
                case Serving():
                    self._not_ready.discard(number)
                    self._metrics.add(number, exchange)
                    self._serving_since[number] = time.monotonic()
                case DrainCommand(grace=grace):
                    self.drain(grace)
                case Collect() | Collected():
                    exchange.receive(message)


def _endpoint(engine: EngineClient, worker: int) -> EngineEndpoint:
    namespace = f"{engine.blobs.namespace}-{worker}"
    return EngineEndpoint(folder=engine.endpoint, namespace=namespace, device=engine.device)


def _command(settings: WorkerSettings, channel: socket.socket) -> list[str]:
    return [
        *(sys.executable, "-m", _MODULE),
        *("--settings", msgspec.json.encode(settings).decode()),
        *("--channel", str(channel.fileno())),
        *("--latency-policy", settings.config.engine.latency_policy),
        *("--parent", str(os.getpid())),
    ]
