"""The service's view of the engine: a supervised process that runs requests."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
import structlog

from legato_engine.blobs import BlobStore, new_namespace
from legato_engine.calls import PendingCalls
from legato_engine.config import EngineConfig
from legato_engine.core import EncodedImage, RawImage, Request
from legato_engine.errors import (
    Draining,
    EngineLost,
    EngineStarting,
    InvalidField,
    LegatoError,
)
from legato_engine.messages import (
    Abort,
    Delta,
    Done,
    DropImage,
    Failed,
    Heartbeat,
    HoldImage,
    ImageDropped,
    ImageHeld,
    Load,
    Loading,
    ModelInfo,
    Queued,
    Ready,
    Report,
    Shutdown,
    Started,
    Stop,
    Submit,
)
from legato_engine.stream import RequestStream
from legato_engine.supervisor import Backoff, EngineProcess
from legato_engine.transport import ServiceLink

_SHUTDOWN_GRACE = 2.0  # seconds an engine gets to leave by itself
_log = structlog.get_logger()


class EngineState(enum.StrEnum):
    """Where the engine stands, as the service sees it."""

    STARTING = "starting"
    READY = "ready"
    LOST = "lost"
    DRAINING = "draining"
    STOPPED = "stopped"


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How long silence and crashes are borne, in seconds.

    An engine whose heartbeats stop for `silence`, or whose steps stand still for `stuck` with work
    pending, is aborted and restarted.
    """

    silence: float = 10.0
    stuck: float = 60.0
    backoff_first: float = 0.25
    backoff_cap: float = 30.0
    stable: float = 60.0


class EngineClient:
    """Runs the engine process, restarts it when it dies, and routes its reports.

    All methods belong to the event loop that called `start`. Picture bytes are handed over through
    `blobs`; a blob named by a submitted request is this client's to discard.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        limits: EngineLimits | None = None,
        command: Sequence[str] = (sys.executable, "-m", "legato_engine.process"),
    ) -> None:
        self._config = config
        self._limits = limits or EngineLimits()
        self._command = tuple(command)
        self._backoff = Backoff(
            first=self._limits.backoff_first,
            cap=self._limits.backoff_cap,
            stable=self._limits.stable,
        )
        self._streams: dict[str, RequestStream] = {}
        self._calls = PendingCalls(self._send)
        self._subscribers: list[Callable[[EngineState], None]] = []
        self._link: ServiceLink | None = None
        self._process: EngineProcess | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._step_moved = 0.0
        self._ready_at = 0.0
        self.blobs = BlobStore(new_namespace())
        self.state = EngineState.STARTING
        self.model: ModelInfo | None = None
        self.load = Load()
        self.step = 0
        self.last_heartbeat = 0.0
        self.estimated_wait = 0.0
        self.progress = Loading(stage="start", fraction=0.0)
        self.restarts = 0

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Start the engine process and its supervision; does not wait for `READY`."""
        self._supervision = asyncio.create_task(self._supervise(), name="engine-supervision")

    async def wait_ready(self) -> None:
        """Return once `READY`; raises `Draining` when that will not happen any more."""
        changed = asyncio.Event()
        unsubscribe = self.subscribe(lambda _: changed.set())
        try:
            while self.state is not EngineState.READY:
                if self.state in (EngineState.DRAINING, EngineState.STOPPED):
                    raise Draining("the engine is shutting down")
                changed.clear()
                await changed.wait()
        finally:
            unsubscribe()

    def drain(self) -> None:
        """Take no new requests; those that run go on. An engine lost from now on stays down."""
        if self.state is not EngineState.STOPPED:
            self._set_state(EngineState.DRAINING)

    async def close(self) -> None:
        """Stop the engine; open streams fail with `Draining`. Idempotent."""
        if self.state is EngineState.STOPPED:
            return
        self._set_state(EngineState.STOPPED)
        self._fail_open(Draining("the server is shutting down"))
        if self._link is not None:
            self._link.send(Shutdown())
        process = self._process
        if process is not None:
            await process.wait_at_most(_SHUTDOWN_GRACE)
            process.kill()
        if self._supervision is not None:
            self._supervision.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervision
        self.blobs.close()

    def subscribe(self, callback: Callable[[EngineState], None]) -> Callable[[], None]:
        """Call `callback` with every new state; the returned function ends that."""
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback)

    # ------------------------------------------------------------ requests

    @property
    def num_open(self) -> int:
        """Requests submitted and not ended."""
        return len(self._streams)

    def submit(self, request: Request) -> RequestStream:
        """Hand a request to the engine; the stream is registered before anything is awaited.

        Raises `EngineStarting`, `EngineLost`, `Draining`, or `InvalidField` when a request with
        this id is open. The blob is discarded in every case.
        """
        try:
            self._check_open(request.request_id)
        except LegatoError:
            self._discard_blob(request)
            raise
        stream = RequestStream(request, on_abort=self._on_abort, on_stop=self._on_stop)
        self._streams[request.request_id] = stream
        self._send(Submit(request=request))
        return stream

    async def hold(self, command: HoldImage) -> ImageHeld:
        """Have the engine hold a picture; its blob is discarded in every case.

        A caller that is cancelled has the engine forget it, unless it is held by then: it then
        stays for its time. Raises as `submit`, what is wrong with the picture, and `QuotaExceeded`.
        """
        try:
            self._check_open(command.request_id)
            held = await self._calls.ask(command)
        finally:
            self.blobs.discard(command.image.blob)
        assert isinstance(held, ImageHeld), "the engine answers a hold with what is held"
        return held

    async def drop(self, command: DropImage) -> None:
        """Have the engine hold a picture no longer. Raises as `submit`, and `ImageNotFound`."""
        self._check_open(command.request_id)
        await self._calls.ask(command)

    def _check_open(self, request_id: str) -> None:
        match self.state:
            case EngineState.STARTING:
                stage, fraction = self.progress.stage, self.progress.fraction
                raise EngineStarting(f"the engine is starting: {stage}, {fraction:.0%}")
            case EngineState.LOST:
                raise EngineLost("the engine is being restarted")
            case EngineState.DRAINING | EngineState.STOPPED:
                raise Draining("the server is shutting down")
        if request_id in self._streams:
            raise InvalidField("a request with this id is running", field="options.request_id")

    def _on_abort(self, stream: RequestStream) -> None:
        self._forget(stream)
        self._send(Abort(request_id=stream.request_id))

    def _on_stop(self, stream: RequestStream) -> None:
        self._send(Stop(request_id=stream.request_id))

    def _send(self, command: Submit | Abort | Stop | HoldImage | DropImage) -> None:
        if self._link is not None:
            self._link.send(command)

    def _forget(self, stream: RequestStream) -> None:
        self._streams.pop(stream.request_id, None)
        self._discard_blob(stream.request)

    def _discard_blob(self, request: Request) -> None:
        if isinstance(request.image, EncodedImage | RawImage):
            self.blobs.discard(request.image.blob)

    def _fail_open(self, error: LegatoError) -> None:
        for stream in list(self._streams.values()):
            self._forget(stream)
            stream.fail(error)
        self._calls.fail(error)

    # ------------------------------------------------------------ reports

    def _on_report(self, report: Report) -> None:
        match report:
            case Delta() | Done() | Started() | Queued() | Failed():
                stream = self._streams.get(report.request_id)
                if stream is not None:  # else aborted a moment ago
                    stream.feed(report)
                    if stream.ended:
                        self._forget(stream)
                elif isinstance(report, Failed):
                    self._calls.settle(report)
            case Heartbeat():
                self._on_heartbeat(report)
            case Loading():
                self.progress = report
            case Ready():
                self._on_ready(report)
            case ImageHeld() | ImageDropped():
                self._calls.settle(report)

    def _on_heartbeat(self, beat: Heartbeat) -> None:
        now = time.monotonic()
        load = beat.load
        idle = load.running + load.waiting + load.inflight == 0
        if idle or beat.step != self.step:
            self._step_moved = now
        self.last_heartbeat = now
        self.step = beat.step
        self.load = load
        self.estimated_wait = beat.estimated_wait

    def _on_ready(self, report: Ready) -> None:
        self.model = report.model
        self.progress = Loading(stage="ready", fraction=1.0)
        self._ready_at = self._step_moved = time.monotonic()
        _log.info("engine ready", pid=report.pid, model=report.model.name)
        if self.state is EngineState.STARTING:
            self._set_state(EngineState.READY)

    # ------------------------------------------------------------ supervision

    async def _supervise(self) -> None:
        while True:
            code = await self._run_once()
            uptime = time.monotonic() - self._ready_at if self._ready_at else 0.0
            self._ready_at = 0.0
            if self.state in (EngineState.DRAINING, EngineState.STOPPED):
                self._fail_open(EngineLost("the engine process ended"))
                return
            self._set_state(EngineState.LOST)
            self._fail_open(EngineLost("the engine process died", exit_code=code))
            delay = self._backoff.delay_after(uptime)
            _log.error("engine lost", exit_code=code, uptime=round(uptime, 3), restart_in=delay)
            await asyncio.sleep(delay)
            if self.state is not EngineState.LOST:
                return
            self.restarts += 1
            self.progress = Loading(stage="start", fraction=0.0)
            self._set_state(EngineState.STARTING)

    async def _run_once(self) -> int:
        """One incarnation, from spawn to exit; whatever it took with it is cleaned up."""
        self._link = ServiceLink(self._on_report)
        self.last_heartbeat = self._step_moved = time.monotonic()
        self.step, self.load, self.estimated_wait = 0, Load(), 0.0
        watchdog: asyncio.Task[None] | None = None
        try:
            self._process = await EngineProcess.spawn(self._arguments(self._link.endpoint))
            watchdog = asyncio.create_task(self._watch(self._process))
            return await self._process.wait()
        except OSError as error:
            _log.error("engine cannot be started", error=str(error))
            return 127
        finally:
            if watchdog is not None:
                watchdog.cancel()
            if self._process is not None:
                self._process.kill()
            self._process = None
            self._link.close()
            self._link = None
            self.load, self.estimated_wait = Load(), 0.0

    def _arguments(self, endpoint: str) -> list[str]:
        return [
            *self._command,
            *("--config", msgspec.json.encode(self._config).decode()),
            *("--endpoint", endpoint),
            *("--namespace", self.blobs.namespace),
            *("--parent", str(os.getpid())),
        ]

    async def _watch(self, process: EngineProcess) -> None:
        """Abort an engine that went silent or stands still."""
        while True:
            await asyncio.sleep(self._config.heartbeat_interval)
            now = time.monotonic()
            silent = now - self.last_heartbeat > self._limits.silence
            stuck = bool(self._ready_at) and now - self._step_moved > self._limits.stuck
            if silent or stuck:
                _log.error("engine hangs", silent=silent, stuck=stuck, step=self.step)
                await process.abort()
                return

    def _set_state(self, state: EngineState) -> None:
        if state is not self.state:
            self.state = state
            for callback in list(self._subscribers):
                callback(state)
