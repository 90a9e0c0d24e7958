"""AdminService: what the engine holds, for the operator."""

from __future__ import annotations

import time

from legato.v1 import admin_pb2 as pb
from legato.v1 import admin_pb2_grpc
from legato_engine.client import EngineState

from legato_service import convert_response
from legato_service.dispatch import Context
from legato_service.engine import Engine
from legato_service.health import Progress
from legato_service.servicer.unimplemented import refuse

_STATES = {
    EngineState.STARTING: "starting",
    EngineState.LOST: "lost",
    EngineState.DRAINING: "draining",
    EngineState.STOPPED: "draining",
}


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Tells what the last heartbeat said; never asks the engine, so it answers under any load."""

    def __init__(self, engine: Engine, progress: Progress) -> None:
        self._engine = engine
        self._progress = progress

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        """Counts as of the last heartbeat; all zero while there is no engine."""
        load = self._engine.load
        response = pb.GetLoadResponse(
            running=load.running,
            waiting=load.waiting,
            kv_used_ratio=load.pages_used / load.pages_total if load.pages_total else 0.0,
            engine_state=self._state(),
            engine_step=self._engine.step,
        )
        if self._engine.state is EngineState.READY:
            wait = convert_response.duration(self._engine.estimated_wait)
            response.estimated_wait.CopyFrom(wait)
        if load.decode_steps is not None:
            response.decode_steps.CopyFrom(convert_response.decode_steps(load.decode_steps))
        return response

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Not built."""
        return await refuse("legato.v1.AdminService.Abort", context)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Not built; SIGTERM does it."""
        return await refuse("legato.v1.AdminService.Drain", context)

    def _state(self) -> str:
        """The contract's word for where the engine stands."""
        if self._engine.state is not EngineState.READY:
            return _STATES[self._engine.state]
        return "serving" if self._progress.is_ready(time.monotonic()) else "stuck"
