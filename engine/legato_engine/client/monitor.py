"""Monitor of the engine's state and liveness, by its messages."""

from __future__ import annotations

import abc
import asyncio
import enum
import time
from collections.abc import Callable

import msgspec
import structlog

from legato_engine.errors import Draining, EngineLost, EngineStarting
from legato_engine.ipc.messages import (
    Heartbeat,
    ImageTotals,
    Loading,
    Ready,
    SchedulerLoad,
    ServedModel,
    StepTotals,
)

TICK = 0.2  # seconds
_LARGEST_GAP = 2 * TICK


class Liveness:
    """Seconds without a heartbeat, and seconds with work but without a step.

    Only time in which this process runs counts: at most `_LARGEST_GAP` between two calls of `tick`,
    which come every `TICK` seconds. Otherwise a pause of this process, whose heartbeats are still
    unread, would look like a pause of the engine.
    """

    def __init__(self) -> None:
        self._step = 0
        self._ticked_at = time.monotonic()
        self.silent = 0.0
        self.unmoved = 0.0

    def restart(self) -> None:
        """Restart the counts: a connection was made, or an engine became ready."""
        self.silent = self.unmoved = 0.0
        self._ticked_at = time.monotonic()

    def tick(self) -> None:
        now = time.monotonic()
        passed = min(now - self._ticked_at, _LARGEST_GAP)
        self._ticked_at = now
        self.silent += passed
        self.unmoved += passed

    def record_heartbeat(self, beat: Heartbeat, *, has_requests: bool = False) -> None:
        """Record a heartbeat.

        `has_requests`: this process has open requests, which a hung engine may not have counted.
        Images in preparation take no steps and have limits of their own.
        """
        self.silent = 0.0
        load = beat.load
        idle = not load.has_steps and (load.preparing > 0 or not has_requests)
        if idle or beat.step != self._step:
            self._step = beat.step
            self.unmoved = 0.0


# ---------------------------------------------------------------- monitor

_log = structlog.get_logger()


class EngineState(enum.StrEnum):
    """The state of the engine and its connection."""

    STARTING = "starting"
    READY = "ready"
    HUNG = "hung"  # possibly alive: the next heartbeat or step makes it ready again
    LOST = "lost"
    DRAINING = "draining"
    STOPPED = "stopped"


class HangLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds after which a ready engine counts as hung.

    `silence` is without a heartbeat, `stuck` without a step while work is pending.
    """

    silence: float = 2.0
    stuck: float = 30.0


class Observable(abc.ABC):
    """One or several engines whose state can be observed."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[[EngineState], None]] = []

    @property
    @abc.abstractmethod
    def state(self) -> EngineState: ...

    def subscribe(self, callback: Callable[[EngineState], None]) -> Callable[[], None]:
        """Call `callback` with the state at each change; the returned function ends that."""
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback)

    async def wait_ready(self) -> None:
        """Wait for `READY`.

        Raises:
            Draining: the engine is draining or stopped.
        """
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

    def _notify(self, state: EngineState) -> None:
        for callback in list(self._subscribers):
            callback(state)


class EngineMonitor(Observable):
    """Latest state, load and start-up progress of an engine. Belongs to one event loop.

    `number` is the engine's among those of the server, `device` as the operator named it.
    """

    state: EngineState = EngineState.STARTING

    def __init__(
        self, hang_limits: HangLimits | None = None, number: int = 0, device: str = ""
    ) -> None:
        super().__init__()
        self.number = number
        self.device = device
        self._log = _log.bind(engine=number)
        self._hang_limits = hang_limits or HangLimits()
        self._liveness = Liveness()
        self._timer: asyncio.TimerHandle | None = None
        self.model: ServedModel | None = None
        self.load = SchedulerLoad()
        self.step_totals = StepTotals()
        self.image_totals = ImageTotals()
        self.step = 0
        self.pid = 0  # of the engine's process; 0 before the first was ready
        self.last_heartbeat = 0.0  # monotonic seconds
        self.estimated_wait = 0.0
        self.num_elsewhere = 0  # requests of other service processes, by the last heartbeat
        self.progress = Loading(stage="start", fraction=0.0)

    def _check_alive(self) -> None:
        if self.state is EngineState.STARTING:
            stage, fraction = self.progress.stage, self.progress.fraction
            raise EngineStarting(f"the engine is starting: {stage}, {fraction:.0%}")
        if self.state is EngineState.LOST:
            raise EngineLost("the engine is being restarted")
        if self.state is EngineState.HUNG:
            raise EngineLost("the engine does not respond")

    @property
    def num_open(self) -> int:
        return 0

    # ------------------------------------------------------------ hangs

    def _watch_liveness(self) -> None:
        """Start the liveness watch of a connection; if it runs, only restart the counts."""
        self._liveness.restart()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)

    def _end_watch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)
        self._liveness.tick()
        self._judge()

    def _judge(self) -> None:
        liveness, limits = self._liveness, self._hang_limits
        hung = liveness.silent >= limits.silence or liveness.unmoved >= limits.stuck
        if hung and self.state is EngineState.READY:
            silent, unmoved = round(liveness.silent, 1), round(liveness.unmoved, 1)
            self._log.error("engine_hung", silent=silent, without_step=unmoved, step=self.step)
            self._set_state(EngineState.HUNG)
        elif not hung and self.state is EngineState.HUNG:
            self._log.info("engine_responds", step=self.step)
            self._set_state(EngineState.READY)
            self._send_waiting()

    def _send_waiting(self) -> None:
        """Send the requests that waited for the engine."""

    # ------------------------------------------------------------ messages

    def _on_heartbeat(self, beat: Heartbeat) -> None:
        self.last_heartbeat = time.monotonic()
        self._liveness.record_heartbeat(beat, has_requests=self.num_open > 0)
        if self.state is EngineState.HUNG:
            self._judge()
        self.step = beat.step
        self.load = beat.load
        self.num_elsewhere = max(0, beat.load.running + beat.load.waiting - self.num_open)
        self.step_totals = beat.steps
        self.image_totals = beat.images
        self.estimated_wait = beat.estimated_wait

    def _on_loading(self, progress: Loading) -> None:
        self.progress = progress
        if self.state is EngineState.LOST:
            self._set_state(EngineState.STARTING)

    def _on_ready(self, ready: Ready) -> None:
        self.model = ready.model
        self.pid = ready.pid
        self.progress = Loading(stage="ready", fraction=1.0)
        self._liveness.restart()
        self._log.info("engine_ready", pid=ready.pid, model=ready.model.name)
        if self.state in (EngineState.STARTING, EngineState.LOST):
            self._set_state(EngineState.READY)
        if self.state is EngineState.READY:
            self._send_waiting()

    def _set_state(self, state: EngineState) -> None:
        if state is not self.state:
            self.state = state
            self._notify(state)
