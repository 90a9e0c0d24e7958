"""Protobuf answers to Python values: pure functions shared by both clients."""

from __future__ import annotations

import dataclasses
import datetime

from google.protobuf import duration_pb2
from google.protobuf.descriptor import EnumDescriptor
from legato.v1 import geometry_pb2, image_pb2, inference_pb2, media_pb2, server_pb2, task_pb2

from legato_client import _errors, _events, _server, _types
from legato_client._errors import LegatoError
from legato_client._images import HeldImage

TaskOutcome = _types.Result | LegatoError


def query(response: inference_pb2.QueryResponse) -> _types.QueryResult:
    """The value of a Query answer."""
    thought = _reasoning(response.reasoning) if response.HasField("reasoning") else None
    return _types.QueryResult(response.answer, thought, _info(response.info))


def caption(response: inference_pb2.CaptionResponse) -> _types.CaptionResult:
    """The value of a Caption answer."""
    return _types.CaptionResult(response.caption, _info(response.info))


def detect(response: inference_pb2.DetectResponse) -> _types.DetectResult:
    """The value of a Detect answer."""
    return _types.DetectResult(tuple(map(_detection, response.objects)), _info(response.info))


def point(response: inference_pb2.PointResponse) -> _types.PointResult:
    """The value of a Point answer."""
    return _types.PointResult(tuple(map(_pointed, response.points)), _info(response.info))


def segment(response: inference_pb2.SegmentResponse) -> _types.SegmentResult:
    """The value of a Segment answer."""
    return _types.SegmentResult(tuple(map(_outline, response.segments)), _info(response.info))


def run_tasks(response: inference_pb2.RunTasksResponse) -> tuple[TaskOutcome, ...]:
    """One outcome per task, in the order asked; a failed task is its error, not raised."""
    info = _info(response.info)
    return tuple(outcome(result, info) for result in response.results)


def event(response: inference_pb2.GenerateResponse) -> _events.Event | None:
    """The typed event, or None for a heartbeat or a kind this client does not know.

    Raises the typed error of a `Finished` whose task failed.
    """
    match response.WhichOneof("event"):
        case "queued":
            queued = response.queued
            return _events.Queued(queued.position, seconds(queued.estimated_wait))
        case "started":
            return _started(response.started)
        case "text":
            return _events.TextDelta(response.text.text, tuple(map(_token, response.text.tokens)))
        case "reasoning":
            thought = response.reasoning
            return _events.ReasoningDelta(thought.text, tuple(map(_grounding, thought.grounding)))
        case "object":
            return _detection(response.object)
        case "point":
            return _pointed(response.point)
        case "outline":
            piece = response.outline
            box = _box(piece.box) if piece.HasField("box") else None
            return _events.OutlineDelta(piece.index, piece.path_delta, box)
        case "finished":
            ended = outcome(response.finished.result, _info(response.finished.info))
            if isinstance(ended, LegatoError):
                raise ended
            return _events.Finished(ended)
        case _:
            return None


def server_info(response: server_pb2.GetServerInfoResponse) -> _server.ServerInfo:
    """The value of a GetServerInfo answer."""
    limits = response.limits
    return _server.ServerInfo(
        name=response.name,
        version=response.version,
        instance_id=response.instance_id,
        contract_revision=response.contract_revision,
        minimum_client_revision=response.minimum_client_revision,
        limits=_server.Limits(
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


def models(response: server_pb2.ListModelsResponse) -> tuple[tuple[_server.ModelInfo, ...], str]:
    """One page of served models and the token of the next page, empty at the end."""
    return tuple(map(_model, response.models)), response.next_page_token


def held_image(response: image_pb2.PutImageResponse) -> HeldImage:
    """The value of a PutImage answer."""
    image, expires = response.image, None
    if response.HasField("expire_time"):
        expires = response.expire_time.ToDatetime(datetime.UTC)
    return HeldImage(image.image_id, image.width, image.height, expires)


def nothing(response: image_pb2.DeleteImageResponse) -> None:
    """The value of an answer that says nothing but OK."""


def _model(message: server_pb2.Model) -> _server.ModelInfo:
    return _server.ModelInfo(
        name=message.name,
        aliases=tuple(message.aliases),
        tasks=tuple(message.tasks),
        streaming_regions=message.streaming_regions,
        max_context_tokens=message.max_context_tokens,
    )


def outcome(result: task_pb2.TaskResult, shared: _types.ResponseInfo) -> TaskOutcome:
    """A task's result with its own finish reason, usage and timings where it has them."""
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
            return _types.QueryResult(query.answer, thought, info, task_id)
        case "caption":
            return _types.CaptionResult(result.caption.caption, info, task_id)
        case "detect":
            objects = tuple(map(_detection, result.detect.objects))
            return _types.DetectResult(objects, info, task_id)
        case "point":
            return _types.PointResult(tuple(map(_pointed, result.point.points)), info, task_id)
        case "segment":
            segments = tuple(map(_outline, result.segment.segments))
            return _types.SegmentResult(segments, info, task_id)
        case "error":
            return _errors.from_status(result.error, info.request_id)
        case _:
            return _errors.InternalError("the server sent a result without content")


def _started(message: inference_pb2.Started) -> _events.Started:
    return _events.Started(
        request_id=message.request_id,
        model=message.model,
        input_tokens=message.input_tokens,
        cached_tokens=message.cached_tokens,
        image=image_info(message.image) if message.HasField("image") else None,
        queue_time=seconds(message.queue_time),
    )


def _box(message: geometry_pb2.Box) -> _types.Box:
    return _types.Box(message.x_min, message.y_min, message.x_max, message.y_max)


def _point(message: geometry_pb2.Point) -> _types.Point:
    return _types.Point(message.x, message.y)


def _detection(message: geometry_pb2.DetectedObject) -> _types.Detection:
    confidence = message.confidence if message.HasField("confidence") else None
    return _types.Detection(_box(message.box), message.label, confidence, message.track_id)


def _pointed(message: geometry_pb2.PointedObject) -> _types.PointedObject:
    confidence = message.confidence if message.HasField("confidence") else None
    return _types.PointedObject(_point(message.point), message.label, confidence)


def _outline(message: geometry_pb2.Outline) -> _types.Outline:
    confidence = message.confidence if message.HasField("confidence") else None
    return _types.Outline(
        message.path, _box(message.box), message.label, confidence, message.coarse
    )


def _token(message: inference_pb2.Token) -> _types.Token:
    logprob = message.logprob if message.HasField("logprob") else None
    return _types.Token(message.token_id, message.text, logprob)


def _grounding(message: task_pb2.Grounding) -> _types.Grounding:
    points = tuple(map(_point, message.points))
    return _types.Grounding(message.start_index, message.end_index, points)


def _reasoning(message: task_pb2.Reasoning) -> _types.Reasoning:
    return _types.Reasoning(message.text, tuple(map(_grounding, message.grounding)))


def _info(message: inference_pb2.ResponseInfo) -> _types.ResponseInfo:
    return _types.ResponseInfo(
        request_id=message.request_id,
        model=message.model,
        finish_reason=_finish_reason(message.finish_reason),
        usage=_usage(message.usage) if message.HasField("usage") else None,
        timings=_timings(message.timings) if message.HasField("timings") else None,
        image=image_info(message.image) if message.HasField("image") else None,
        stamp=stamp(message.stamp) if message.HasField("stamp") else None,
    )


def _finish_reason(number: int) -> str:
    return enum_word(task_pb2.FinishReason.DESCRIPTOR, number)


def enum_word(enum: EnumDescriptor, number: int) -> str:
    """A value's own part of its name in lower case; "unspecified" for one of a newer contract."""
    value = enum.values_by_number.get(number)
    if value is None:
        return "unspecified"
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return value.name.removeprefix(prefix).lower()


def _usage(message: task_pb2.Usage) -> _types.Usage:
    return _types.Usage(
        input_tokens=message.input_tokens,
        output_tokens=message.output_tokens,
        cached_tokens=message.cached_tokens if message.HasField("cached_tokens") else None,
        image_tokens=message.image_tokens if message.HasField("image_tokens") else None,
        reasoning_tokens=message.reasoning_tokens if message.HasField("reasoning_tokens") else None,
    )


def _timings(message: task_pb2.Timings) -> _types.Timings:
    return _types.Timings(
        queue=seconds(message.queue),
        image=seconds(message.image),
        prefill=seconds(message.prefill),
        first_token=seconds(message.first_token),
        decode=seconds(message.decode),
        total=seconds(message.total),
    )


def image_info(message: media_pb2.ImageInfo) -> _types.ImageInfo:
    """The picture as answered about."""
    return _types.ImageInfo(message.image_id, message.width, message.height, message.cache_hit)


def stamp(message: media_pb2.FrameStamp) -> _types.FrameStamp:
    """A frame's identity."""
    capture_time = message.capture_time if message.HasField("capture_time") else None
    return _types.FrameStamp(
        frame_id=message.frame_id,
        capture_time_ns=capture_time.ToNanoseconds() if capture_time else None,
        sequence=message.sequence,
    )


def seconds(duration: duration_pb2.Duration) -> float:
    """A duration in seconds."""
    return duration.ToTimedelta().total_seconds()
