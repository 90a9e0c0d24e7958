"""Protobuf responses to Python values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

from google.protobuf import duration_pb2
from google.protobuf.descriptor import EnumDescriptor
from legato.v1 import geometry_pb2, inference_pb2, media_pb2, task_pb2

from legato_client import _errors
from legato_client._errors import LegatoError
from legato_client._values import events, results
from legato_client._values.motion import BoxAxes, Motion

TaskOutcome = results.Result | LegatoError

_FINISH_REASONS: EnumDescriptor = task_pb2.FinishReason.DESCRIPTOR


def query(response: inference_pb2.QueryResponse) -> results.QueryResult:
    thought = _reasoning(response.reasoning) if response.HasField("reasoning") else None
    return results.QueryResult(response.answer, thought, _info(response.info))


def caption(response: inference_pb2.CaptionResponse) -> results.CaptionResult:
    return results.CaptionResult(response.caption, _info(response.info))


def detect(response: inference_pb2.DetectResponse) -> results.DetectResult:
    return results.DetectResult(tuple(map(_detection, response.objects)), _info(response.info))


def point(response: inference_pb2.PointResponse) -> results.PointResult:
    return results.PointResult(tuple(map(_pointed, response.points)), _info(response.info))


def segment(response: inference_pb2.SegmentResponse) -> results.SegmentResult:
    return results.SegmentResult(tuple(map(_outline, response.segments)), _info(response.info))


def run_tasks(response: inference_pb2.RunTasksResponse) -> tuple[TaskOutcome, ...]:
    """In the order of the tasks; a failed task is its error, not raised."""
    info = _info(response.info)
    tokens = [_tokens(each.tokens) for each in response.tokens]
    return tuple(
        outcome(result, dataclasses.replace(info, tokens=own))
        for result, own in zip(response.results, tokens or repeat(()), strict=False)
    )


def event(response: inference_pb2.GenerateResponse) -> events.Event | None:
    """None for a heartbeat or a kind this client does not know.

    Raises the error of a `Finished` whose task failed.
    """
    kind = response.WhichOneof("event")
    return _EVENTS[kind](getattr(response, kind)) if kind in _EVENTS else None


def outcome(result: task_pb2.TaskResult, shared: results.ResponseInfo) -> TaskOutcome:
    """A task's own finish reason, usage and timings replace the shared ones."""
    reason = _finish_reason(result.finish_reason)
    info = dataclasses.replace(
        shared,
        finish_reason=shared.finish_reason if reason == "unspecified" else reason,
        usage=_usage(result.usage) if result.HasField("usage") else shared.usage,
        timings=_timings(result.timings) if result.HasField("timings") else shared.timings,
    )
    task_id = result.task_id
    match result.WhichOneof("result"):
        case "query":
            query = result.query
            thought = _reasoning(query.reasoning) if query.HasField("reasoning") else None
            return results.QueryResult(query.answer, thought, info, task_id)
        case "caption":
            return results.CaptionResult(result.caption.caption, info, task_id)
        case "detect":
            objects = tuple(map(_detection, result.detect.objects))
            return results.DetectResult(objects, info, task_id)
        case "point":
            return results.PointResult(tuple(map(_pointed, result.point.points)), info, task_id)
        case "segment":
            segments = tuple(map(_outline, result.segment.segments))
            return results.SegmentResult(segments, info, task_id)
        case "error":
            return _errors.from_status(result.error, info.request_id)
        case _:
            return _errors.InternalError("the server sent a result without content")


def _queued(message: inference_pb2.Queued) -> events.Queued:
    return events.Queued(message.position, seconds(message.estimated_wait))


def _started(message: inference_pb2.Started) -> events.Started:
    return events.Started(
        request_id=message.request_id,
        model=message.model,
        input_tokens=message.input_tokens,
        cached_tokens=message.cached_tokens,
        image=image_info(message.image) if message.HasField("image") else None,
        queue_time=seconds(message.queue_time),
    )


def _box(message: geometry_pb2.Box) -> results.Box:
    return results.Box(message.x_min, message.y_min, message.x_max, message.y_max)


def _point(message: geometry_pb2.Point) -> results.Point:
    return results.Point(message.x, message.y)


def _detection(message: geometry_pb2.DetectedObject) -> results.Detection:
    confidence = message.confidence if message.HasField("confidence") else None
    return results.Detection(
        box=_box(message.box),
        label=message.label,
        confidence=confidence,
        track_id=message.track_id,
        motion=_motion(message.motion) if message.HasField("motion") else None,
    )


def _motion(message: geometry_pb2.Motion) -> Motion:
    return Motion(
        position=_axes(message.position),
        velocity=_axes(message.velocity),
        acceleration=_axes(message.acceleration),
        position_deviation=_axes(message.position_deviation),
        velocity_deviation=_axes(message.velocity_deviation),
        acceleration_deviation=_axes(message.acceleration_deviation),
    )


def _axes(message: geometry_pb2.BoxAxes) -> BoxAxes:
    return BoxAxes(message.center_x, message.center_y, message.width, message.height)


def _pointed(message: geometry_pb2.PointedObject) -> results.PointedObject:
    confidence = message.confidence if message.HasField("confidence") else None
    return results.PointedObject(_point(message.point), message.label, confidence)


def _outline(message: geometry_pb2.Outline) -> results.Outline:
    confidence = message.confidence if message.HasField("confidence") else None
    return results.Outline(
        message.path, _box(message.box), message.label, confidence, message.coarse
    )


def _finished(message: inference_pb2.Finished) -> events.Finished:
    ended = outcome(message.result, _info(message.info))
    if isinstance(ended, LegatoError):
        raise ended
    return events.Finished(ended)


def _text_delta(message: inference_pb2.TextDelta) -> events.TextDelta:
    return events.TextDelta(message.text, _tokens(message.tokens))


def _tokens_delta(message: inference_pb2.TokensDelta) -> events.TokensDelta:
    return events.TokensDelta(_tokens(message.tokens))


def _reasoning_delta(message: inference_pb2.ReasoningDelta) -> events.ReasoningDelta:
    return events.ReasoningDelta(
        text=message.text,
        grounding=tuple(map(_grounding, message.grounding)),
        tokens=_tokens(message.tokens),
    )


def _outline_delta(message: inference_pb2.OutlineDelta) -> events.OutlineDelta:
    box = _box(message.box) if message.HasField("box") else None
    return events.OutlineDelta(message.index, message.path_delta, box)


def _tokens(messages: Iterable[inference_pb2.Token]) -> tuple[results.Token, ...]:
    return tuple(map(_token, messages))


def _token(message: inference_pb2.Token) -> results.Token:
    kind = message.WhichOneof("value")
    return results.Token(
        token_id=message.token_id,
        text=message.text,
        logprob=message.logprob if message.HasField("logprob") else None,
        coordinate=message.coordinate if kind == "coordinate" else None,
        size=(message.size.width, message.size.height) if kind == "size" else None,
        alternatives=tuple(map(_alternative, message.alternatives)),
        certainty=_certainty(message.certainty) if message.HasField("certainty") else None,
    )


def _alternative(message: inference_pb2.TokenAlternative) -> results.TokenAlternative:
    return results.TokenAlternative(message.token_id, message.text, message.logprob)


def _certainty(message: inference_pb2.TokenCertainty) -> results.TokenCertainty:
    return results.TokenCertainty(message.existence, message.concentration)


def _grounding(message: task_pb2.Grounding) -> results.Grounding:
    points = tuple(map(_point, message.points))
    return results.Grounding(message.start_index, message.end_index, points)


def _reasoning(message: task_pb2.Reasoning) -> results.Reasoning:
    return results.Reasoning(message.text, tuple(map(_grounding, message.grounding)))


def _info(message: inference_pb2.ResponseInfo) -> results.ResponseInfo:
    return results.ResponseInfo(
        request_id=message.request_id,
        model=message.model,
        finish_reason=_finish_reason(message.finish_reason),
        usage=_usage(message.usage) if message.HasField("usage") else None,
        timings=_timings(message.timings) if message.HasField("timings") else None,
        image=image_info(message.image) if message.HasField("image") else None,
        stamp=stamp(message.stamp) if message.HasField("stamp") else None,
        tokens=_tokens(message.tokens),
        resumptions=message.resumptions,
    )


def _finish_reason(number: int) -> str:
    return enum_word(_FINISH_REASONS, number)


@functools.lru_cache(256)  # every answer names one, always of the same few
def enum_word(enum: EnumDescriptor, number: int) -> str:
    """Without the enum's prefix; "unspecified" for a value of a newer contract."""
    value = enum.values_by_number.get(number)
    if value is None:
        return "unspecified"
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return value.name.removeprefix(prefix).lower()


def _usage(message: task_pb2.Usage) -> results.Usage:
    return results.Usage(
        input_tokens=message.input_tokens,
        output_tokens=message.output_tokens,
        cached_tokens=message.cached_tokens if message.HasField("cached_tokens") else None,
        image_tokens=message.image_tokens if message.HasField("image_tokens") else None,
        reasoning_tokens=message.reasoning_tokens if message.HasField("reasoning_tokens") else None,
    )


def _timings(message: task_pb2.Timings) -> results.Timings:
    return results.Timings(
        queue=seconds(message.queue),
        image=seconds(message.image),
        prefill=seconds(message.prefill),
        first_token=seconds(message.first_token),
        decode=seconds(message.decode),
        total=seconds(message.total),
    )


def image_info(message: media_pb2.ImageInfo) -> results.ImageInfo:
    return results.ImageInfo(message.image_id, message.width, message.height, message.cache_hit)


def stamp(message: media_pb2.FrameStamp) -> results.FrameStamp:
    capture_time = message.capture_time if message.HasField("capture_time") else None
    return results.FrameStamp(
        frame_id=message.frame_id,
        capture_time_ns=capture_time.ToNanoseconds() if capture_time else None,
        sequence=message.sequence,
    )


def seconds(duration: duration_pb2.Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


_EVENTS: dict[str, Callable[[Any], events.Event]] = {
    "queued": _queued,
    "started": _started,
    "text": _text_delta,
    "reasoning": _reasoning_delta,
    "point": _pointed,
    "object": _detection,
    "outline": _outline_delta,
    "tokens": _tokens_delta,
    "finished": _finished,
}
