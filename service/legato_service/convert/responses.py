"""`core` values to protobuf responses.

Results are filled in place; see `response_info`.
"""

from __future__ import annotations

from google.rpc import status_pb2
from legato.v1 import admin_pb2, geometry_pb2, inference_pb2, task_pb2
from legato_engine import core
from legato_engine.ipc.messages import (
    Done,
    PipelineStats,
    Queued,
    Started,
    TimelineBatch,
    TimelineSpan,
)

from legato_service.convert.response_info import (
    FINISH_REASONS,
    duration,
    fill_timings,
    fill_tokens,
    fill_usage,
    image_info,
)

# ---------------------------------------------------------------- results


def query(result: core.QueryResult) -> inference_pb2.QueryResponse:
    response = inference_pb2.QueryResponse()
    _fill_query(response, result)
    return response


def caption(result: core.CaptionResult) -> inference_pb2.CaptionResponse:
    return inference_pb2.CaptionResponse(caption=result.caption)


def detect(result: core.DetectResult) -> inference_pb2.DetectResponse:
    response = inference_pb2.DetectResponse()
    _fill_detect(response, result)
    return response


def point(result: core.PointResult) -> inference_pb2.PointResponse:
    response = inference_pb2.PointResponse()
    _fill_point(response, result)
    return response


def segment(result: core.SegmentResult) -> inference_pb2.SegmentResponse:
    response = inference_pb2.SegmentResponse()
    _fill_segment(response, result)
    return response


def task_result(task_id: str, done: Done) -> task_pb2.TaskResult:
    finish_reason = FINISH_REASONS[done.finish_reason]
    message = task_pb2.TaskResult(task_id=task_id, finish_reason=finish_reason)
    fill_usage(message.usage, done.usage)
    fill_timings(message.timings, done.timings)
    # An empty result is sent too: it names its skill.
    match done.result:
        case core.QueryResult() as result:
            message.query.SetInParent()
            _fill_query(message.query, result)
        case core.CaptionResult() as result:
            message.caption.SetInParent()
            message.caption.caption = result.caption
        case core.DetectResult() as result:
            message.detect.SetInParent()
            _fill_detect(message.detect, result)
        case core.PointResult() as result:
            message.point.SetInParent()
            _fill_point(message.point, result)
        case core.SegmentResult() as result:
            message.segment.SetInParent()
            _fill_segment(message.segment, result)
    return message


def task_error(task_id: str, status: status_pb2.Status) -> task_pb2.TaskResult:
    return task_pb2.TaskResult(task_id=task_id, error=status)


def _fill_query(
    message: task_pb2.QueryResult | inference_pb2.QueryResponse, result: core.QueryResult
) -> None:
    message.answer = result.answer
    if result.reasoning is not None:
        message.reasoning.text = result.reasoning
        message.reasoning.grounding.extend(_grounding(value) for value in result.grounding)


def _fill_detect(
    message: task_pb2.DetectResult | inference_pb2.DetectResponse, result: core.DetectResult
) -> None:
    objects = message.objects
    for value in result.objects:
        _fill_object(objects.add(), value)


def _fill_point(
    message: task_pb2.PointResult | inference_pb2.PointResponse, result: core.PointResult
) -> None:
    points = message.points
    for value in result.points:
        _fill_pointed(points.add(), value)


def _fill_segment(
    message: task_pb2.SegmentResult | inference_pb2.SegmentResponse, result: core.SegmentResult
) -> None:
    message.segments.extend(_outline(value) for value in result.segments)


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


def delta(event: core.Event, index: int) -> inference_pb2.GenerateResponse:
    message = inference_pb2.GenerateResponse()
    message.index = index
    match event:
        case core.TextDelta():
            message.text.text = event.text
            fill_tokens(message.text.tokens, event.tokens)
        case core.PointEvent():
            _fill_pointed(message.point, event)
        case core.ObjectEvent():
            _fill_object(message.object, event)
        case core.ReasoningDelta():
            message.reasoning.text = event.text
            message.reasoning.grounding.extend(_grounding(value) for value in event.grounding)
            fill_tokens(message.reasoning.tokens, event.tokens)
        case core.TokensDelta():
            fill_tokens(message.tokens.tokens, event.tokens)
        case core.OutlineEvent():
            message.outline.index = event.index
            message.outline.path_delta = event.path_delta
            if event.box is not None:
                message.outline.box.CopyFrom(_box(event.box))
    return message


# ---------------------------------------------------------------- pieces


def _grounding(value: core.Grounding) -> task_pb2.Grounding:
    return task_pb2.Grounding(
        start_index=value.start_index,
        end_index=value.end_index,
        points=[_point(each) for each in value.points],
    )


def _fill_object(message: geometry_pb2.DetectedObject, value: core.ObjectEvent) -> None:
    message.label = value.label
    box, found = message.box, value.box
    box.x_min, box.y_min, box.x_max, box.y_max = found.x_min, found.y_min, found.x_max, found.y_max
    if value.confidence is not None:
        message.confidence = value.confidence


def _fill_pointed(message: geometry_pb2.PointedObject, value: core.PointEvent) -> None:
    message.label = value.label
    message.point.x, message.point.y = value.point.x, value.point.y
    if value.confidence is not None:
        message.confidence = value.confidence


def _outline(value: core.Outline) -> geometry_pb2.Outline:
    return geometry_pb2.Outline(
        path=value.path,
        box=_box(value.box),
        label=value.label,
        confidence=value.confidence,
        coarse=value.coarse,
    )


def _point(value: core.Point) -> geometry_pb2.Point:
    return geometry_pb2.Point(x=value.x, y=value.y)


def _box(value: core.Box) -> geometry_pb2.Box:
    return geometry_pb2.Box(
        x_min=value.x_min, y_min=value.y_min, x_max=value.x_max, y_max=value.y_max
    )
