"""The main loop of the engine process."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING

import msgspec

from legato_engine import failpoints
from legato_engine.engine.quarantine import Quarantine
from legato_engine.ipc.commands import (
    Abort,
    Command,
    DropImage,
    HoldImage,
    SetPipelineDepth,
    Shutdown,
    Stop,
    Submit,
)
from legato_engine.ipc.heartbeat import Vitals
from legato_engine.ipc.messages import Heartbeat
from legato_engine.ipc.service_connections import ServiceConnections
from legato_engine.telemetry.step_stats import StepStats
from legato_engine.telemetry.step_totals import StepCounter
from legato_engine.telemetry.timeline import StepListener
from legato_engine.telemetry.timeline_stream import TimelineStream

if TYPE_CHECKING:
    from legato_engine.engine.engine_core import EngineCore  # imports torch
    from legato_engine.null.engine import NullEngine

    Core = EngineCore | NullEngine

_MOMENT_MS = 5  # without a command before the loop publishes and sleeps


@dataclasses.dataclass(frozen=True, slots=True)
class Telemetry:
    """What the engine tells of its launches."""

    stats: StepStats
    counter: StepCounter
    stream: TimelineStream

    @classmethod
    def of(cls, connections: ServiceConnections) -> Telemetry:
        stats = StepStats()
        return cls(stats, StepCounter(), TimelineStream(connections, stats))

    @property
    def listeners(self) -> tuple[StepListener, ...]:
        return (self.stats, self.counter, self.stream)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineLoop:
    """Reads commands, carries them out, steps the engine and publishes its figures."""

    core: Core
    telemetry: Telemetry
    connections: ServiceConnections
    vitals: Vitals
    quarantine: Quarantine

    def run(self) -> None:
        """Serve until `Shutdown`.

        What the loop publishes must be true while it sleeps, except for sleeps under `_MOMENT_MS`:
        publishing would cost more than the requests.
        """
        core, connections, quarantine = self.core, self.connections, self.quarantine
        while True:
            connections.flush()
            if self.vitals.due:
                self.publish()
            if not core.busy:
                deadline = core.next_deadline()
                if deadline < time.monotonic() + _MOMENT_MS / 1000:
                    connections.wait(_timeout_ms(deadline))
                elif not connections.wait(_MOMENT_MS):
                    self.publish()
                    connections.wait(_timeout_ms(deadline))
            for command in connections.receive():
                if isinstance(command, Shutdown):
                    return
                quarantine.receive(command)
            core.step()
            quarantine.advance()

    def publish(self) -> None:
        self.vitals.due = False
        self.telemetry.stream.flush()
        steps = self.telemetry.stats.latest(time.monotonic(), fresh=not self.core.busy)
        load = self.core.load()
        waiting = load.waiting + self.quarantine.num_held
        self.vitals.beat = Heartbeat(
            step=self.core.steps_committed,
            load=msgspec.structs.replace(load, waiting=waiting, decode_steps=steps),
            estimated_wait=self.core.estimated_wait(),
            steps=self.telemetry.counter.totals(),
            images=self.core.image_totals(),
        )


def apply(core: Core, command: Command) -> None:
    """Carry out a command but `Shutdown`, which ends the loop."""
    match command:
        case Submit(request=request):
            if failpoints.ACTIVE:
                failpoints.hit("engine.poison", str(request.task))
            core.submit(request)
        case Abort(request_id=request_id):
            core.abort(request_id)
        case Stop(request_id=request_id):
            core.stop(request_id)
        case HoldImage():
            core.hold(command)
        case DropImage():
            core.drop(command)
        case SetPipelineDepth(depth=depth):
            core.set_pipeline_depth(depth)


def _timeout_ms(deadline: float) -> int | None:
    if deadline == math.inf:
        return None
    return max(0, math.ceil((deadline - time.monotonic()) * 1000))
