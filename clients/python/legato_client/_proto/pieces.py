"""Parts of messages that are values of Python, both ways."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.descriptor import EnumDescriptor
from legato.v1 import geometry_pb2, inference_pb2, media_pb2, task_pb2

from legato_client._errors import InternalError
from legato_client._types import results
from legato_client._types.results import BoxAxes, Motion
from legato_client._types.tasks import SpatialRef

_FINISH_REASONS: EnumDescriptor = task_pb2.FinishReason.DESCRIPTOR


def box(message: geometry_pb2.Box) -> results.Box:
    return results.Box(message.x_min, message.y_min, message.x_max, message.y_max)


def point(message: geometry_pb2.Point) -> results.Point:
    return results.Point(message.x, message.y)


def detection(message: geometry_pb2.DetectedObject) -> results.Detection:
    confidence = message.confidence if message.HasField("confidence") else None
    return results.Detection(
        box=box(message.box),
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


def pointed(message: geometry_pb2.PointedObject) -> results.PointedObject:
    confidence = message.confidence if message.HasField("confidence") else None
    return results.PointedObject(point(message.point), message.label, confidence)


def outline(message: geometry_pb2.Outline) -> results.Outline:
    confidence = message.confidence if message.HasField("confidence") else None
    return results.Outline(
        message.path, box(message.box), message.label, confidence, message.coarse
    )


def tokens(messages: Iterable[inference_pb2.Token]) -> tuple[results.Token, ...]:
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
        bytes=message.bytes,
    )


def _alternative(message: inference_pb2.TokenAlternative) -> results.TokenAlternative:
    return results.TokenAlternative(message.token_id, message.text, message.logprob, message.bytes)


def _certainty(message: inference_pb2.TokenCertainty) -> results.TokenCertainty:
    return results.TokenCertainty(message.existence, message.concentration)


def grounding(message: task_pb2.Grounding) -> results.Grounding:
    points = tuple(map(point, message.points))
    return results.Grounding(message.start_index, message.end_index, points)


def reasoning(message: task_pb2.Reasoning) -> results.Reasoning:
    return results.Reasoning(message.text, tuple(map(grounding, message.grounding)))


def info(message: inference_pb2.ResponseInfo) -> results.ResponseInfo:
    return results.ResponseInfo(
        request_id=message.request_id,
        model=message.model,
        finish_reason=finish_reason(message.finish_reason),
        usage=usage(message.usage) if message.HasField("usage") else None,
        timings=timings(message.timings) if message.HasField("timings") else None,
        image=image_info(message.image) if message.HasField("image") else None,
        stamp=stamp(message.stamp) if message.HasField("stamp") else None,
        tokens=tokens(message.tokens),
        resumptions=message.resumptions,
        images=tuple(map(image_info, message.images)),
    )


def finish_reason(number: int) -> str:
    return enum_word(_FINISH_REASONS, number)


@functools.lru_cache(256)  # every answer names one, always of the same few
def enum_word(enum: EnumDescriptor, number: int) -> str:
    """Return the value's name without its prefix; "unspecified" for one of a newer contract."""
    value = enum.values_by_number.get(number)
    if value is None:
        return "unspecified"
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return value.name.removeprefix(prefix).lower()


def usage(message: task_pb2.Usage) -> results.Usage:
    return results.Usage(
        input_tokens=message.input_tokens,
        output_tokens=message.output_tokens,
        cached_tokens=message.cached_tokens if message.HasField("cached_tokens") else None,
        image_tokens=message.image_tokens if message.HasField("image_tokens") else None,
        reasoning_tokens=message.reasoning_tokens if message.HasField("reasoning_tokens") else None,
    )


def timings(message: task_pb2.Timings) -> results.Timings:
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


def moment(message: timestamp_pb2.Timestamp) -> timestamp_pb2.Timestamp:
    """Return the timestamp, which then converts without an error.

    Raises:
        InternalError: it is out of the bounds of timestamps.
    """
    try:
        message.ToNanoseconds()
    except ValueError as error:
        raise InternalError(f"the server's answer is malformed: {error}") from None
    return message


def stamp(message: media_pb2.FrameStamp) -> results.FrameStamp:
    capture_time = message.capture_time if message.HasField("capture_time") else None
    return results.FrameStamp(
        frame_id=message.frame_id,
        capture_time_ns=moment(capture_time).ToNanoseconds() if capture_time else None,
        sequence=message.sequence,
    )


def seconds(duration: duration_pb2.Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


MAX_SECONDS = 315_576_000_000
"""Maximum of protobuf's Duration: 10,000 years."""


def duration(seconds: float) -> duration_pb2.Duration:
    """Convert to a duration. Raises ValueError for a time outside of 0 to `MAX_SECONDS`."""
    if not 0 <= seconds <= MAX_SECONDS:
        raise ValueError(f"a time must be 0 to {MAX_SECONDS} seconds, got {seconds}")
    message = duration_pb2.Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def to_refs(refs: Iterable[SpatialRef]) -> list[geometry_pb2.SpatialRef]:
    return [
        geometry_pb2.SpatialRef(point=geometry_pb2.Point(x=ref.x, y=ref.y))
        if isinstance(ref, results.Point)
        else geometry_pb2.SpatialRef(
            box=geometry_pb2.Box(x_min=ref.x_min, y_min=ref.y_min, x_max=ref.x_max, y_max=ref.y_max)
        )
        for ref in refs
    ]
