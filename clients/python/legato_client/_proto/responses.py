"""Protobuf responses to Python values."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from itertools import repeat
from typing import Any

from legato.v1 import admin_pb2, image_pb2, inference_pb2, server_pb2, session_pb2, task_pb2

from legato_client import _errors
from legato_client._errors import LegatoError
from legato_client._images.sources import HeldImage
from legato_client._proto import pieces, skills
from legato_client._proto.pieces import moment, seconds
from legato_client._types import results, server

TaskOutcome = results.Result | LegatoError


def run_tasks(response: inference_pb2.RunTasksResponse) -> tuple[TaskOutcome, ...]:
    """Convert outcomes in task order; a failed task is its error, not raised."""
    info = pieces.info(response.info)
    tokens = [pieces.tokens(each.tokens) for each in response.tokens]
    return tuple(
        outcome(result, dataclasses.replace(info, tokens=own))
        for result, own in zip(response.results, tokens or repeat(()), strict=False)
    )


def event_of(response: inference_pb2.GenerateResponse) -> results.Event | None:
    """Convert an event; None for a heartbeat or a kind this client does not know.

    Raises the error of a `Finished` whose task failed.
    """
    kind = response.WhichOneof("event")
    return _EVENTS[kind](getattr(response, kind)) if kind in _EVENTS else None


def outcome(result: task_pb2.TaskResult, shared: results.ResponseInfo) -> TaskOutcome:
    """Convert a task's outcome; its own finish reason, usage and timings replace shared ones."""
    reason = pieces.finish_reason(result.finish_reason)
    info = dataclasses.replace(
        shared,
        finish_reason=shared.finish_reason if reason == "unspecified" else reason,
        usage=pieces.usage(result.usage) if result.HasField("usage") else shared.usage,
        timings=pieces.timings(result.timings) if result.HasField("timings") else shared.timings,
    )
    kind = result.WhichOneof("result")
    if kind is None:
        return _errors.InternalError("the server sent a result without content")
    if kind == "error":
        return _errors.from_status(result.error, info.request_id)
    answer: results.Result = skills.BY_NAME[kind].read(getattr(result, kind), info, result.task_id)
    return answer


def _queued(message: inference_pb2.Queued) -> results.Queued:
    return results.Queued(message.position, pieces.seconds(message.estimated_wait))


def _started(message: inference_pb2.Started) -> results.Started:
    return results.Started(
        request_id=message.request_id,
        model=message.model,
        input_tokens=message.input_tokens,
        cached_tokens=message.cached_tokens,
        image=pieces.image_info(message.image) if message.HasField("image") else None,
        queue_time=pieces.seconds(message.queue_time),
    )


def _finished(message: inference_pb2.Finished) -> results.Finished:
    ended = outcome(message.result, pieces.info(message.info))
    if isinstance(ended, LegatoError):
        raise ended
    return results.Finished(ended)


def _text_delta(message: inference_pb2.TextDelta) -> results.TextDelta:
    return results.TextDelta(message.text, pieces.tokens(message.tokens))


def _tokens_delta(message: inference_pb2.TokensDelta) -> results.TokensDelta:
    return results.TokensDelta(pieces.tokens(message.tokens))


def _reasoning_delta(message: inference_pb2.ReasoningDelta) -> results.ReasoningDelta:
    return results.ReasoningDelta(
        text=message.text,
        grounding=tuple(map(pieces.grounding, message.grounding)),
        tokens=pieces.tokens(message.tokens),
    )


def _outline_delta(message: inference_pb2.OutlineDelta) -> results.OutlineDelta:
    box = pieces.box(message.box) if message.HasField("box") else None
    return results.OutlineDelta(message.index, message.path_delta, box)


_EVENTS: dict[str, Callable[[Any], results.Event]] = {
    "queued": _queued,
    "started": _started,
    "text": _text_delta,
    "reasoning": _reasoning_delta,
    "point": pieces.pointed,
    "object": pieces.detection,
    "outline": _outline_delta,
    "tokens": _tokens_delta,
    "finished": _finished,
}


# ---------------------------------------------------------------- server


def server_info(response: server_pb2.GetServerInfoResponse) -> server.ServerInfo:
    limits = response.limits
    return server.ServerInfo(
        name=response.name,
        version=response.version,
        instance_id=response.instance_id,
        contract_revision=response.contract_revision,
        minimum_client_revision=response.minimum_client_revision,
        limits=server.Limits(
            max_request_bytes=limits.max_request_bytes,
            max_image_pixels=limits.max_image_pixels,
            max_context_tokens=limits.max_context_tokens,
            max_output_tokens=limits.max_output_tokens,
            max_running=limits.max_running,
            max_waiting=limits.max_waiting,
            max_sessions=limits.max_sessions,
            default_deadline=seconds(limits.default_deadline),
        ),
        capabilities=tuple(response.capabilities),
        shm_namespace=response.shm_namespace,
    )


def models(response: server_pb2.ListModelsResponse) -> tuple[tuple[server.ModelInfo, ...], str]:
    """Return the models and the next page's token, which is empty at the end."""
    return tuple(map(_model, response.models)), response.next_page_token


def held_image(response: image_pb2.PutImageResponse) -> HeldImage:
    image, expires = response.image, None
    if response.HasField("expire_time"):
        expires = moment(response.expire_time).ToDatetime(datetime.UTC)
    return HeldImage(image.image_id, image.width, image.height, expires)


def no_image(response: image_pb2.DeleteImageResponse) -> None:
    pass


def _model(message: server_pb2.Model) -> server.ModelInfo:
    return server.ModelInfo(
        name=message.name,
        aliases=tuple(message.aliases),
        tasks=tuple(message.tasks),
        streaming_regions=message.streaming_regions,
        max_context_tokens=message.max_context_tokens,
        confidence=_confidence(message.confidence) if message.HasField("confidence") else None,
        notice=message.notice,
        max_images=message.max_images,
    )


def _confidence(message: server_pb2.Confidence) -> server.ConfidenceInfo:
    fitted_at = None
    if message.HasField("fitted_at"):
        fitted_at = moment(message.fitted_at).ToDatetime(datetime.UTC)
    return server.ConfidenceInfo(
        tuple(message.tasks), tuple(message.calibrated_tasks), message.fitted_on, fitted_at
    )


# ---------------------------------------------------------------- session


def terms(message: session_pb2.SessionOpened) -> server.SessionTerms:
    return server.SessionTerms(
        session_id=message.session_id,
        model=message.model,
        max_in_flight=message.max_in_flight,
        heartbeat_interval=pieces.seconds(message.heartbeat_interval),
    )


def result(message: session_pb2.FrameResult, model: str) -> server.FrameResult:
    stamp = pieces.stamp(message.stamp)
    image = pieces.image_info(message.image) if message.HasField("image") else None
    shared = results.ResponseInfo("", model, "unspecified", image=image, stamp=stamp)
    return server.FrameResult(
        stamp=stamp,
        task_id=message.result.task_id,
        outcome=outcome(message.result, shared),
        image=image,
        last_for_frame=message.last_for_frame,
        age=pieces.seconds(message.age) if message.HasField("age") else None,
    )


def dropped(message: session_pb2.FrameDropped) -> server.FrameDropped:
    reason = pieces.enum_word(session_pb2.DropReason.DESCRIPTOR, message.reason)
    return server.FrameDropped(message.sequence, reason, message.dropped_total)


def delta(message: session_pb2.FrameDelta) -> server.FrameDelta | None:
    """Convert a delta; None for a kind this client does not know."""
    event = event_of(message.event)
    if event is None:
        return None
    return server.FrameDelta(message.sequence, message.task_id, event)


def go_away(message: session_pb2.SessionGoAway) -> server.GoAway:
    reason = _errors.from_status(message.reason) if message.reason.code else None
    return server.GoAway(pieces.seconds(message.time_left), reason)


# ---------------------------------------------------------------- admin


def load(response: admin_pb2.GetLoadResponse) -> server.Load:
    wait = response.estimated_wait if response.HasField("estimated_wait") else None
    steps = response.decode_steps if response.HasField("decode_steps") else None
    return server.Load(
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


def _engine(engine: admin_pb2.EngineLoad) -> server.EngineLoad:
    wait = engine.estimated_wait if engine.HasField("estimated_wait") else None
    steps = engine.decode_steps if engine.HasField("decode_steps") else None
    return server.EngineLoad(
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


def abort_count(response: admin_pb2.AbortResponse) -> server.AbortCount:
    return server.AbortCount(response.aborted, response.already_finished)


def unfinished(response: admin_pb2.DrainResponse) -> server.Unfinished:
    return server.Unfinished(response.running, response.waiting, response.sessions)


def metrics(response: admin_pb2.GetMetricsResponse) -> str:
    return response.text


def timeline(response: admin_pb2.WatchTimelineResponse) -> server.TimelineUpdate:
    steps = response.decode_steps if response.HasField("decode_steps") else None
    return server.TimelineUpdate(
        spans=tuple(_span(each, response.engine) for each in response.spans),
        decode_steps=None if steps is None else _steps(steps),
        engine=response.engine,
        engine_started=response.engine_started_ns / 1e9,
        lost_launches=response.lost_launches,
        pipeline_depth=response.pipeline_depth,
        depth_switch=response.depth_switch,
    )


def no_depth(response: admin_pb2.SetPipelineDepthResponse) -> None:
    pass


def _span(span: admin_pb2.TimelineSpan, engine: int) -> server.TimelineSpan:
    return server.TimelineSpan(
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


def _steps(steps: admin_pb2.DecodeSteps) -> server.DecodeSteps:
    return server.DecodeSteps(
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
        mask_ms=steps.mask_ms,
    )
