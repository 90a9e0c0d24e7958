"""`core` values as protobuf responses. Pure.

Messages on the way of every answer are filled in place: protobuf copies a message that is given to
another one's constructor, which takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.rpc import status_pb2
from legato.v1 import admin_pb2, geometry_pb2, inference_pb2, task_pb2
from legato_engine import core
from legato_engine.ipc.messages import Done, PipelineStats, Queued, Started

from legato_service.convert.info import (
    FINISH,
    duration,
    fill_timings,
    fill_tokens,
    fill_usage,
    image,
)

# ---------------------------------------------------------------- results


def fill_query(
    message: task_pb2.QueryResult | inference_pb2.QueryResponse, result: core.QueryResult
) -> None:
    """The answer, with the thoughts where there were any."""
    message.answer = result.answer
    if result.reasoning is not None:
        message.reasoning.text = result.reasoning
        message.reasoning.grounding.extend(_grounding(value) for value in result.grounding)


def fill_caption(
    message: task_pb2.CaptionResult | inference_pb2.CaptionResponse, result: core.CaptionResult
) -> None:
    """The caption."""
    message.caption = result.caption


def fill_objects(
    message: task_pb2.DetectResult | inference_pb2.DetectResponse, result: core.DetectResult
) -> None:
    """All boxes."""
    objects = message.objects
    for found in result.objects:
        _fill_object(objects.add(), found)


def fill_points(
    message: task_pb2.PointResult | inference_pb2.PointResponse, result: core.PointResult
) -> None:
    """All points."""
    points = message.points
    for found in result.points:
        _fill_pointed(points.add(), found)


def fill_segments(
    message: task_pb2.SegmentResult | inference_pb2.SegmentResponse, result: core.SegmentResult
) -> None:
    """All outlines."""
    message.segments.extend(_outline(found) for found in result.segments)


def task_result(task_id: str, done: Done) -> task_pb2.TaskResult:
    """How one task of a request ended, when it ended well."""
    message = task_pb2.TaskResult(task_id=task_id, finish_reason=FINISH[done.finish_reason])
    fill_usage(message.usage, done.usage)
    fill_timings(message.timings, done.timings)
    name, fill = _RESULTS[type(done.result)]
    result = getattr(message, name)
    result.SetInParent()  # also of nothing
    fill(result, done.result)
    return message


_RESULTS: dict[type, tuple[str, Callable[[Any, Any], None]]] = {
    core.QueryResult: ("query", fill_query),
    core.CaptionResult: ("caption", fill_caption),
    core.DetectResult: ("detect", fill_objects),
    core.PointResult: ("point", fill_points),
    core.SegmentResult: ("segment", fill_segments),
}


def task_error(task_id: str, status: status_pb2.Status) -> task_pb2.TaskResult:
    """How one task of a request ended, when it failed."""
    return task_pb2.TaskResult(task_id=task_id, error=status)


# ---------------------------------------------------------------- about the engine


def decode_steps(report: PipelineStats) -> admin_pb2.DecodeSteps:
    """What a decode step costs."""
    return admin_pb2.DecodeSteps(
        steps=report.num_steps,
        tokens=report.num_tokens,
        rows=report.rows,
        step_ms=report.step_ms,
        forward_ms=report.forward_ms,
        sampling_ms=report.sampling_ms,
        bookkeeping_ms=report.bookkeeping_ms,
        wait_ms=report.wait_ms,
        idle_ms=report.idle_ms,
        blocking_ms=report.blocking_ms,
        zombie_ratio=report.zombie_ratio,
        predicted_gain=report.predicted_gain,
    )


# ---------------------------------------------------------------- events


def queued(report: Queued) -> inference_pb2.GenerateResponse:
    """The request waits."""
    return inference_pb2.GenerateResponse(
        queued=inference_pb2.Queued(
            position=report.position, estimated_wait=duration(report.estimated_wait)
        )
    )


def started(report: Started, request_id: str) -> inference_pb2.GenerateResponse:
    """The request runs."""
    return inference_pb2.GenerateResponse(
        started=inference_pb2.Started(
            request_id=request_id,
            model=report.model,
            input_tokens=report.input_tokens,
            cached_tokens=report.cached_tokens,
            image=image(report.image),
            queue_time=duration(report.queue_time),
        )
    )


def delta(event: core.Event, index: int) -> inference_pb2.GenerateResponse:
    """What one step added, as the event of this number."""
    message = inference_pb2.GenerateResponse()
    message.index = index
    _FILL[type(event)](message, event)
    return message


def _fill_text(message: inference_pb2.GenerateResponse, event: core.TextDelta) -> None:
    message.text.text = event.text
    fill_tokens(message.text.tokens, event.tokens)


def _fill_thought(message: inference_pb2.GenerateResponse, event: core.ReasoningDelta) -> None:
    message.reasoning.text = event.text
    message.reasoning.grounding.extend(_grounding(value) for value in event.grounding)
    fill_tokens(message.reasoning.tokens, event.tokens)


def _fill_outline(message: inference_pb2.GenerateResponse, event: core.OutlineEvent) -> None:
    outline = message.outline
    outline.index = event.index
    outline.path_delta = event.path_delta
    if event.box is not None:
        outline.box.CopyFrom(_box(event.box))


_FILL: dict[type, Callable[[inference_pb2.GenerateResponse, Any], None]] = {
    core.TextDelta: _fill_text,
    core.ReasoningDelta: _fill_thought,
    core.TokensDelta: lambda message, event: fill_tokens(message.tokens.tokens, event.tokens),
    core.PointEvent: lambda message, event: _fill_pointed(message.point, event),
    core.ObjectEvent: lambda message, event: _fill_object(message.object, event),
    core.OutlineEvent: _fill_outline,
}


# ---------------------------------------------------------------- pieces


def _grounding(value: core.Grounding) -> task_pb2.Grounding:
    return task_pb2.Grounding(
        start_index=value.start_index,
        end_index=value.end_index,
        points=[_point(spot) for spot in value.points],
    )


def _fill_object(message: geometry_pb2.DetectedObject, value: core.ObjectEvent) -> None:
    message.label = value.label
    box, at = message.box, value.box
    box.x_min, box.y_min, box.x_max, box.y_max = at.x_min, at.y_min, at.x_max, at.y_max


def _fill_pointed(message: geometry_pb2.PointedObject, value: core.PointEvent) -> None:
    message.label = value.label
    point, at = message.point, value.point
    point.x, point.y = at.x, at.y


def _outline(value: core.Outline) -> geometry_pb2.Outline:
    return geometry_pb2.Outline(
        path=value.path, box=_box(value.box), label=value.label, coarse=value.coarse
    )


def _point(value: core.Point) -> geometry_pb2.Point:
    return geometry_pb2.Point(x=value.x, y=value.y)


def _box(value: core.Box) -> geometry_pb2.Box:
    return geometry_pb2.Box(
        x_min=value.x_min, y_min=value.y_min, x_max=value.x_max, y_max=value.y_max
    )
