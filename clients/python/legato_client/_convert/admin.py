"""Admin responses as Python values."""

from __future__ import annotations

from legato.v1 import admin_pb2

from legato_client._convert import pieces
from legato_client._values import admin


def load(response: admin_pb2.GetLoadResponse) -> admin.Load:
    wait = response.estimated_wait if response.HasField("estimated_wait") else None
    steps = response.decode_steps if response.HasField("decode_steps") else None
    return admin.Load(
        running=response.running,
        waiting=response.waiting,
        sessions=response.sessions,
        kv_used_ratio=response.kv_used_ratio,
        estimated_wait=None if wait is None else pieces.seconds(wait),
        engine_state=response.engine_state,
        engine_step=response.engine_step,
        decode_steps=None if steps is None else _steps(steps),
        engines=tuple(map(_engine, response.engines)),
    )


def _engine(engine: admin_pb2.EngineLoad) -> admin.EngineLoad:
    wait = engine.estimated_wait if engine.HasField("estimated_wait") else None
    steps = engine.decode_steps if engine.HasField("decode_steps") else None
    return admin.EngineLoad(
        device=engine.device,
        state=engine.state,
        running=engine.running,
        waiting=engine.waiting,
        kv_used_ratio=engine.kv_used_ratio,
        estimated_wait=None if wait is None else pieces.seconds(wait),
        step=engine.step,
        restarts=engine.restarts,
        decode_steps=None if steps is None else _steps(steps),
        pipeline_depth=engine.pipeline_depth,
    )


def abort_count(response: admin_pb2.AbortResponse) -> admin.AbortCount:
    return admin.AbortCount(response.aborted, response.already_finished)


def unfinished(response: admin_pb2.DrainResponse) -> admin.Unfinished:
    return admin.Unfinished(response.running, response.waiting, response.sessions)


def metrics(response: admin_pb2.GetMetricsResponse) -> str:
    return response.text


def timeline(response: admin_pb2.WatchTimelineResponse) -> admin.TimelineUpdate:
    steps = response.decode_steps if response.HasField("decode_steps") else None
    return admin.TimelineUpdate(
        spans=tuple(_span(each, response.engine) for each in response.spans),
        decode_steps=None if steps is None else _steps(steps),
        engine=response.engine,
        engine_started=response.engine_started_ns / 1e9,
        lost_launches=response.lost_launches,
        pipeline_depth=response.pipeline_depth,
        depth_switch=response.depth_switch,
    )


def nothing(response: admin_pb2.SetPipelineDepthResponse) -> None:
    pass


def _span(span: admin_pb2.TimelineSpan, engine: int) -> admin.TimelineSpan:
    return admin.TimelineSpan(
        lane=span.lane,
        name=span.name,
        start=span.start_ns / 1e9,
        duration=span.duration_ns / 1e9,
        launch=span.launch,
        kind=span.kind,
        rows=span.rows,
        riding=span.riding,
        zombies=span.zombies,
        engine=engine,
        tokens=span.tokens,
    )


def _steps(steps: admin_pb2.DecodeSteps) -> admin.DecodeSteps:
    return admin.DecodeSteps(
        steps=steps.steps,
        tokens=steps.tokens,
        rows=steps.rows,
        step_ms=steps.step_ms,
        forward_ms=steps.forward_ms,
        sampling_ms=steps.sampling_ms,
        bookkeeping_ms=steps.bookkeeping_ms,
        wait_ms=steps.wait_ms,
        idle_ms=steps.idle_ms,
        blocking_ms=steps.blocking_ms,
        zombie_ratio=steps.zombie_ratio,
        predicted_gain=steps.predicted_gain,
        observed_gain=steps.observed_gain,
    )
