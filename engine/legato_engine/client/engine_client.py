"""The first service process's connection, which also runs the engine process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from legato_engine import crash
from legato_engine.client.connection import EngineConnection
from legato_engine.client.monitor import TICK, EngineState, HangLimits
from legato_engine.client.recovery import RefusedRequests
from legato_engine.config import EngineConfig
from legato_engine.crash import CrashFiles, Death, default_folder
from legato_engine.errors import EngineLost, InvalidField
from legato_engine.hub import store
from legato_engine.ipc import latency_policy
from legato_engine.ipc.messages import Loading, Ready, Shutdown
from legato_engine.ipc.transport import ListeningSockets
from legato_engine.shm import new_namespace, own_namespace, private_path, sweep_blobs

_FIELDS = ("weights", "tokenizer", "adapters", "refiner")


def require_files(config: EngineConfig) -> None:
    """Check that model files exist; an engine would notice only after seconds of imports.

    Raises:
        InvalidField: a file is missing, or the model was not pulled.
    """
    for field in _FIELDS:
        path = getattr(config, field)
        if path and not Path(path).exists():
            raise InvalidField(f"no such file or folder: {path}", field=field)
    given = config.weights or config.tokenizer or config.random_weights
    if config.model in store.MODELS and not given:
        store.find(config.models, config.model)


# ---------------------------------------------------------------- supervisor

EXIT_UNSERVABLE = os.EX_CONFIG
"""Exit code of an engine whose configuration cannot be served; a restart would not help."""

STACKS_SIGNAL = signal.SIGUSR2
"""Makes an engine write the stacks of all threads."""


SERVED_AFTER = 1.0
"""Seconds after which a ready process counts as one that served."""


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class RestartBackoff:
    """Delays before restarts: none after a process that served, else doubled.

    The limit is `cap`, or `ready_cap` after a process that became ready: it may die of its first
    request each time. The delays keep such restarts from saturating the machine.
    """

    first: float
    cap: float
    ready_cap: float
    _next: float = 0.0  # 0: `first`

    def delay(self, *, ready: bool, served: bool) -> float:
        if served:
            self._next = 0.0
            return 0.0
        delay = min(self._next or self.first, self.ready_cap if ready else self.cap)
        self._next = min(delay * 2, self.cap)
        return delay


class ChildProcess:
    """Child process in its own session; stdout and stderr are inherited."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def spawn(cls, command: Sequence[str], inherited: Sequence[int] = ()) -> ChildProcess:
        """Start `command` with the `inherited` descriptors."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=tuple(inherited),
        )
        return cls(process)

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        """Return the exit code, negative for a signal."""
        return await self._process.wait()

    def dump_stacks(self) -> None:
        """Have a process that handles `STACKS_SIGNAL` write its stacks; it continues."""
        if self.alive:
            self._process.send_signal(STACKS_SIGNAL)

    def bytes_read(self) -> int:
        """Return the bytes read so far, pages of mapped files included; 0 if unknown."""
        try:
            lines = pathlib.Path(f"/proc/{self.pid}/io").read_text().splitlines()
        except OSError:
            return 0
        counts = {name: int(count) for name, _, count in (line.partition(":") for line in lines)}
        return counts.get("rchar", 0) + counts.get("read_bytes", 0)

    async def wait_at_most(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(self.wait())), seconds)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


# ---------------------------------------------------------------- engine client

_SHUTDOWN_GRACE = 2.0  # seconds for an engine to exit by itself


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits in seconds for a hanging engine and for the restart of a dead one.

    An engine writes its stacks after `silence` without a heartbeat, or `stuck` without a step while
    work is pending, and is killed after twice that. While it loads, `loading` replaces `silence`,
    because importing from a slow disk blocks its interpreter; what it reads counts as a sign of
    life. After `hang` a ready engine gets no new requests.
    """

    hang: HangLimits = HangLimits()
    silence: float = 5.0
    loading: float = 60.0
    stuck: float = 30.0
    backoff_first: float = 0.25
    backoff_cap: float = 30.0
    backoff_ready_cap: float = 1.0


class EngineClient(EngineConnection):
    """Connection that also runs the engine process and restarts it when it dies.

    Other service processes connect with `EngineConnection` at `endpoint`; their blobs' namespaces
    begin with that of `blobs`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        limits: EngineLimits | None = None,
        command: Sequence[str] = (sys.executable, "-m", "legato_engine.core.process"),
        number: int = 0,
        refused: RefusedRequests | None = None,
    ) -> None:
        self._limits = limits or EngineLimits()
        super().__init__(
            new_namespace(),
            latency_policy.resolve(config.latency_policy),
            hang_limits=self._limits.hang,
            number=number,
            device=config.device,
            refused=refused,
        )
        self._config = config
        self._command = tuple(command)
        self._backoff = RestartBackoff(
            first=self._limits.backoff_first,
            cap=self._limits.backoff_cap,
            ready_cap=self._limits.backoff_ready_cap,
        )
        self._listeners = ListeningSockets()
        self._owner_lock = own_namespace(self.blobs.namespace)
        self._process: ChildProcess | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._ready_at = 0.0  # monotonic seconds; 0 before the engine is ready
        self._answered_before = 0
        self._crash_files: CrashFiles | None = None  # of the running engine
        self._num_started = self._pid = 0
        self._bundling: set[asyncio.Task[None]] = set()
        self.unservable = False

    @property
    def endpoint(self) -> str:
        return self._listeners.endpoint

    # ------------------------------------------------------------ lifecycle

    async def start(self) -> None:
        """Start the engine process and its supervision; does not wait for `READY`.

        Removes what service processes that were killed have left.
        """
        blobs, folders = sweep_blobs(), ListeningSockets.sweep()
        if blobs or folders:
            self._log.info("leftovers_removed", blobs=blobs, folders=folders)
        self._supervision = asyncio.create_task(self._supervise(), name="engine-supervision")

    async def close(self) -> None:
        """Stop the engine, at once if it is loading; open streams fail with `Draining`.

        Idempotent.
        """
        self._send(Shutdown())
        await super().close()
        process = self._process
        if process is not None:
            if self._ready_at:
                await process.wait_at_most(_SHUTDOWN_GRACE)
            process.kill()
        if self._supervision is not None:
            self._supervision.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervision
        await asyncio.gather(*self._bundling)
        self._listeners.close()
        self._owner_lock.release()

    # ------------------------------------------------------------ messages

    def _on_ready(self, ready: Ready) -> None:
        self._ready_at = time.monotonic()
        self._answered_before = self.num_answered
        super()._on_ready(ready)

    # ------------------------------------------------------------ supervision

    async def _supervise(self) -> None:
        while True:
            code = await self._run_once()
            uptime = time.monotonic() - self._ready_at if self._ready_at else 0.0
            answered = self.num_answered > self._answered_before
            ready = bool(self._ready_at)
            served = ready and (answered or uptime >= SERVED_AFTER)
            self._ready_at = 0.0
            self._keep_crash(code, uptime)
            self._lose(EngineLost("the engine process died", exit_code=code))
            if code == EXIT_UNSERVABLE:
                self.unservable = True
                self._fail_open(EngineLost("the engine cannot be started again"))
                return
            if self.state is EngineState.LOST:
                delay = self._backoff.delay(ready=ready, served=served)
                self._log.error(
                    "engine_lost", exit_code=code, uptime=round(uptime, 3), restart_in=delay
                )
                await asyncio.sleep(delay)
            if self.state is not EngineState.LOST:
                return
            self.restarts += 1
            self.progress = Loading(stage="start", fraction=0.0)
            self._set_state(EngineState.STARTING)

    async def _run_once(self) -> int:
        self._disconnect()  # otherwise rejecting pending connections would close this one, too
        self._listeners.reject_pending()
        self.connect(self.endpoint)
        watchdog: asyncio.Task[None] | None = None
        try:
            self._process = await ChildProcess.spawn(self._arguments(), self._listeners.filenos)
            self._pid = self._process.pid
            watchdog = asyncio.create_task(self._watch(self._process))
            return await self._process.wait()
        except OSError as error:
            self._log.error("engine_start_failed", error=str(error))
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
            *self._crash_arguments(),
        ]

    def _crash_arguments(self) -> tuple[str, ...]:
        """Create the engine's crash files, in memory so that writes never wait for a disk."""
        if not self._config.crash_bundles:
            return ()
        self._num_started += 1
        self._crash_files = CrashFiles(private_path(self.blobs.namespace, str(self._num_started)))
        return ("--crash-files", str(self._crash_files.prefix))

    def _keep_crash(self, code: int, uptime: float) -> None:
        files, self._crash_files = self._crash_files, None
        if files is None:
            return
        if code in (0, EXIT_UNSERVABLE) or self.state is EngineState.STOPPED:
            files.remove()
            return
        death = Death(pid=self._pid, exit_code=code, uptime=uptime, restarts=self.restarts)
        task = asyncio.create_task(asyncio.to_thread(self._write_bundle, files, death))
        self._bundling.add(task)
        task.add_done_callback(self._bundling.discard)

    def _write_bundle(self, files: CrashFiles, death: Death) -> None:
        config = self._config
        folder = pathlib.Path(config.crash_folder) if config.crash_folder else default_folder()
        try:
            path = crash.write(files, death, config, folder, config.crash_bundles)
            self._log.error("engine_crash_bundle", path=str(path), exit_code=death.exit_code)
        except OSError as error:
            self._log.error("crash_bundle_failed", folder=str(folder), error=str(error))
        finally:
            files.remove()

    async def _watch(self, process: ChildProcess) -> None:
        """Kill an engine that hangs; have it write its stacks at half the limit."""
        asked, began, bytes_read = False, time.monotonic(), 0
        while (hang := self._hang_fraction()) < 2:
            if hang < 1:
                asked = False
            elif not asked and self.last_heartbeat > began:  # else it may not handle it yet
                asked = True
                process.dump_stacks()
            await asyncio.sleep(TICK)
            if not self._ready_at and (now_read := process.bytes_read()) != bytes_read:
                bytes_read = now_read
                self._liveness.restart()
        silent, unmoved = round(self._liveness.silent, 1), round(self._liveness.unmoved, 1)
        self._log.error("engine_killed", silent=silent, without_step=unmoved, step=self.step)
        process.kill()

    def _hang_fraction(self) -> float:
        """Return the time without progress as a fraction of the hang limit."""
        limits, liveness = self._limits, self._liveness
        if not self._ready_at:
            return liveness.silent / limits.loading
        return max(liveness.silent / limits.silence, liveness.unmoved / limits.stuck)
