"""`core` values to protobuf responses.

Results are filled in place; see `response_info`.
"""

from __future__ import annotations

from google.rpc import status_pb2
from legato.v1 import admin_pb2, inference_pb2, task_pb2
from legato_engine.core.events import (
    Event,
    ObjectEvent,
    OutlineEvent,
    PointEvent,
    ReasoningDelta,
    TextDelta,
    TokensDelta,
)
from legato_engine.ipc.figures import PipelineStats
from legato_engine.ipc.messages import Done, Queued, Started, TimelineBatch, TimelineSpan

from legato_service.convert import pieces, skills
from legato_service.convert.response_info import (
    FINISH_REASONS,
    duration,
    fill_timings,
    fill_tokens,
    fill_usage,
    image_info,
)

# ---------------------------------------------------------------- results


def task_result(task_id: str, done: Done) -> task_pb2.TaskResult:
    finish_reason = FINISH_REASONS[done.finish_reason]
    message = task_pb2.TaskResult(task_id=task_id, finish_reason=finish_reason)
    fill_usage(message.usage, done.usage)
    fill_timings(message.timings, done.timings)
    skill = skills.BY_RESULT[type(done.result)]
    own = getattr(message, skill.name)
    own.SetInParent()  # an empty result is sent too: it names its skill
    skill.fill(own, done.result)
    return message


def task_error(task_id: str, status: status_pb2.Status) -> task_pb2.TaskResult:
    return task_pb2.TaskResult(task_id=task_id, error=status)


# ---------------------------------------------------------------- the engine


def decode_steps(stats: PipelineStats) -> admin_pb2.DecodeSteps:
    return admin_pb2.DecodeSteps(
        steps=stats.num_steps,
        tokens=stats.num_tokens,
        rows=stats.rows,
        step_ms=stats.step_ms,
        forward_ms=stats.forward_ms,
        sampling_ms=stats.sampling_ms,
        bookkeeping_ms=stats.bookkeeping_ms,
        wait_ms=stats.wait_ms,
        idle_ms=stats.idle_ms,
        blocking_ms=stats.blocking_ms,
        zombie_ratio=stats.zombie_ratio,
        predicted_gain=stats.predicted_gain,
        observed_gain=stats.observed_gain,
    )


def timeline(
    batch: TimelineBatch, engine: int = 0, lost: int = 0, *, depth_switch: bool = False
) -> admin_pb2.WatchTimelineResponse:
    response = admin_pb2.WatchTimelineResponse(
        spans=map(_timeline_span, batch.spans),
        engine=engine,
        engine_started_ns=batch.started,
        lost_launches=lost,
        pipeline_depth=batch.pipeline_depth,
        depth_switch=depth_switch,
    )
    if batch.decode_steps is not None:
        response.decode_steps.CopyFrom(decode_steps(batch.decode_steps))
    return response


def _timeline_span(span: TimelineSpan) -> admin_pb2.TimelineSpan:
    return admin_pb2.TimelineSpan(
        lane=span.lane,
        name=span.name,
        start_ns=span.start,
        duration_ns=span.duration,
        launch=span.launch,
        kind=span.kind,
        rows=span.rows,
        riding=span.riding,
        zombies=span.zombies,
        tokens=span.tokens,
    )


# ---------------------------------------------------------------- events


def queued(output: Queued) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        queued=inference_pb2.Queued(
            position=output.position, estimated_wait=duration(output.estimated_wait)
        )
    )


def started(output: Started, request_id: str) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        started=inference_pb2.Started(
            request_id=request_id,
            model=output.model,
            input_tokens=output.input_tokens,
            cached_tokens=output.cached_tokens,
            image=None if output.image is None else image_info(output.image),
            queue_time=duration(output.queue_time),
        )
    )


def delta(event: Event, index: int) -> inference_pb2.GenerateResponse:
    message = inference_pb2.GenerateResponse()
    message.index = index
    match event:
        case TextDelta():
            message.text.text = event.text
            fill_tokens(message.text.tokens, event.tokens)
        case PointEvent():
            pieces.fill_pointed(message.point, event)
        case ObjectEvent():
            pieces.fill_object(message.object, event)
        case ReasoningDelta():
            message.reasoning.text = event.text
            message.reasoning.grounding.extend(map(pieces.grounding, event.grounding))
            fill_tokens(message.reasoning.tokens, event.tokens)
        case TokensDelta():
            fill_tokens(message.tokens.tokens, event.tokens)
        case OutlineEvent():
            message.outline.index = event.index
            message.outline.path_delta = event.path_delta
            if event.box is not None:
                message.outline.box.CopyFrom(pieces.box(event.box))
    return message
