"""AdminService."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Literal

from legato.v1 import admin_pb2 as pb
from legato.v1 import admin_pb2_grpc
from legato_engine.client.connection import EngineConnection
from legato_engine.client.monitor import EngineState
from legato_engine.errors import InvalidField
from legato_engine.ipc.messages import TimelineBatch
from legato_engine.types import RequestKey

from legato_service.convert import responses, skills
from legato_service.convert.responses import duration
from legato_service.engines import group
from legato_service.engines.group import EngineGroup
from legato_service.errors import MethodUnknown
from legato_service.lifecycle import Peers
from legato_service.requests.registry import RequestRegistry
from legato_service.rpc import call
from legato_service.rpc.call import Context
from legato_service.session.session import SessionRegistry

_STATES = {
    EngineState.STARTING: "starting",
    EngineState.READY: "serving",
    EngineState.HUNG: "stuck",
    EngineState.LOST: "lost",
    EngineState.DRAINING: "draining",
    EngineState.STOPPED: "draining",
}


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Handlers of AdminService; they respond under any load, as they never wait for the engine.

    `scrape` returns the metrics of all processes and their format. `sets_depth`: the operator may
    set the pipeline's depth.
    """

    def __init__(
        self,
        engines: EngineGroup,
        registry: RequestRegistry,
        sessions: SessionRegistry,
        peers: Peers,
        *,
        default_grace: float,
        scrape: Callable[[str], Awaitable[tuple[bytes, str]]],
        sets_depth: bool,
    ) -> None:
        self._engines = engines
        self._registry = registry
        self._sessions = sessions
        self._peers = peers
        self._default_grace = default_grace
        self._scrape = scrape
        self._sets_depth = sets_depth

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        engines = self._engines
        response = pb.GetLoadResponse(
            sessions=len(self._sessions),
            engine_state=self._state(engines.state),
            engine_step=engines.step,
            engines=map(self._engine_load, engines.members),
        )
        _fill_load(response, engines)
        return response

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Abort requests; calls that share a request count as one.

        With a tenant in the metadata, an id is that tenant's; without one, it is of any tenant.
        """
        target = request.WhichOneof("target")
        if target == "session_id":
            return pb.AbortResponse(aborted=self._sessions.abort(_key(request, target)))
        if target == "request_id":
            key = _key(request, target)
            aborted, ended = self._registry.stop(key)
            aborted += await self._peers.abort(key)
            return pb.AbortResponse(aborted=aborted, already_finished=ended)
        if target == "all" and request.all:
            aborted = self._registry.stop_all() + await self._peers.abort(None)
            return pb.AbortResponse(aborted=aborted + self._sessions.abort(None))
        if target == "all":
            raise InvalidField("must be true", field="all")
        raise InvalidField("must be one of request_id, session_id and all", field="target")

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Begin to drain, as SIGTERM does."""
        grace = self._default_grace
        if request.HasField("grace"):
            grace = skills.seconds(request.grace)
        self._peers.drain(grace)
        load = self._engines.load
        return pb.DrainResponse(
            running=load.running, waiting=load.waiting, sessions=len(self._sessions)
        )

    async def GetMetrics(
        self, request: pb.GetMetricsRequest, context: Context
    ) -> pb.GetMetricsResponse:
        text, content_type = await self._scrape(request.accept)
        return pb.GetMetricsResponse(text=text.decode(), content_type=content_type)

    async def WatchTimeline(
        self, request: pb.WatchTimelineRequest, context: Context
    ) -> AsyncIterator[pb.WatchTimelineResponse]:
        """Stream the timeline; the first response comes at once, as an idle engine sends none."""
        seconds = None
        if request.HasField("duration"):
            seconds = skills.seconds(request.duration)
        empty = TimelineBatch(spans=(), decode_steps=self._engines.load.decode_steps)
        yield responses.timeline(empty, depth_switch=self._sets_depth)
        watches = [each.timeline for each in self._engines.members]
        async with aclosing(group.batches(watches, seconds)) as batches:
            async for number, (batch, lost) in batches:
                yield responses.timeline(batch, number, lost, depth_switch=self._sets_depth)

    async def SetPipelineDepth(
        self, request: pb.SetPipelineDepthRequest, context: Context
    ) -> pb.SetPipelineDepthResponse:
        if not self._sets_depth:
            raise MethodUnknown("this server does not allow it (--depth-switch)")
        if request.depth not in (1, 2):
            raise InvalidField("must be 1 or 2", field="depth")
        for each in self._engines.members:
            each.set_pipeline_depth(request.depth)
        return pb.SetPipelineDepthResponse()

    def _state(self, state: EngineState) -> str:
        return "draining" if self._registry.is_closed else _STATES[state]

    def _engine_load(self, engine: EngineConnection) -> pb.EngineLoad:
        response = pb.EngineLoad(
            device=engine.device,
            state=self._state(engine.state),
            step=engine.step,
            restarts=engine.restarts,
            pipeline_depth=engine.load.pipeline_depth,
        )
        _fill_load(response, engine)
        return response


def _fill_load(
    message: pb.GetLoadResponse | pb.EngineLoad, engine: EngineGroup | EngineConnection
) -> None:
    load = engine.load
    message.running, message.waiting = load.running, load.waiting
    message.kv_used_ratio = load.pages_used / load.pages_total if load.pages_total else 0.0
    if engine.state is EngineState.READY:
        message.estimated_wait.CopyFrom(duration(engine.estimated_wait))
    if load.decode_steps is not None:
        message.decode_steps.CopyFrom(responses.decode_steps(load.decode_steps))


def _key(request: pb.AbortRequest, field: Literal["session_id", "request_id"]) -> RequestKey:
    target = request.session_id if field == "session_id" else request.request_id
    if not target:
        raise InvalidField("must not be empty", field=field)
    return RequestKey(target, call.current().tenant)
