"""Engine results to protobuf responses.

Fields are set in place: protobuf copies a message that is passed to the constructor of another.
Nested constructors would cost a Query 7 us more, 4 % of its CPU in the service.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from google.protobuf import duration_pb2
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from legato.v1 import admin_pb2, inference_pb2, media_pb2, task_pb2
from legato_engine.ipc.messages import (
    Done,
    LaunchSpan,
    PipelineStats,
    PrefillStarted,
    QueuePosition,
    TimelineBatch,
)
from legato_engine.types import (
    Event,
    FinishReason,
    ImageProperties,
    ObjectEvent,
    OutlineEvent,
    PointEvent,
    ReasoningEvent,
    RequestTimings,
    TextEvent,
    TokenInfo,
    TokensEvent,
    TokenUsage,
)

from legato_service.convert import skills

_NANOSECONDS = 1_000_000_000
FINISH_REASONS = {
    each: task_pb2.FinishReason.Value(f"FINISH_REASON_{each.name}") for each in FinishReason
}
_DECODE_STEPS = {field.name for field in admin_pb2.DecodeSteps.DESCRIPTOR.fields}


def fill_info(
    message: inference_pb2.ResponseInfo,
    request_id: str,
    model: str,
    done: Done,
    stamp: media_pb2.FrameStamp | None,
) -> None:
    message.request_id = request_id
    message.model = model
    message.finish_reason = FINISH_REASONS[done.finish_reason]
    fill_usage(message.usage, done.usage)
    fill_timings(message.timings, done.timings)
    if done.image is not None:
        message.image.CopyFrom(image_info(done.image))
        if done.more_images:
            message.images.extend(map(image_info, (done.image, *done.more_images)))
    if stamp is not None:
        message.stamp.CopyFrom(stamp)
    if done.resumptions:
        message.resumptions = done.resumptions
    if done.tokens:
        fill_tokens(message.tokens, done.tokens)


def fill_usage(message: task_pb2.Usage, value: TokenUsage) -> None:
    """Send the last three counts even when they are 0."""
    message.input_tokens = value.input_tokens
    message.output_tokens = value.output_tokens
    message.cached_tokens = value.cached_tokens
    message.image_tokens = value.image_tokens
    message.reasoning_tokens = value.reasoning_tokens


def fill_timings(message: task_pb2.Timings, value: RequestTimings) -> None:
    """Send each duration even when it is 0."""
    fill_duration(message.queue, value.queue)
    fill_duration(message.image, value.image)
    fill_duration(message.prefill, value.prefill)
    fill_duration(message.first_token, value.first_token)
    fill_duration(message.decode, value.decode)
    fill_duration(message.total, value.total)


def fill_duration(message: duration_pb2.Duration, seconds: float) -> None:
    """Set a duration, to the nanosecond; negative values become 0."""
    nanos = int(seconds * 1e9 + 0.5)  # `round` costs a call
    if nanos >= _NANOSECONDS:
        message.seconds, nanos = divmod(nanos, _NANOSECONDS)
    message.nanos = nanos


def fill_tokens(
    messages: RepeatedCompositeFieldContainer[inference_pb2.Token],
    tokens: Sequence[TokenInfo],
) -> None:
    for token in tokens:
        message = messages.add(token_id=token.token_id, text=token.text, bytes=token.piece)
        if token.logprob is not None:
            message.logprob = token.logprob
        if token.coordinate is not None:
            message.coordinate = token.coordinate
        if token.size is not None:
            message.size.width, message.size.height = token.size
        if token.certainty is not None:
            message.certainty.existence, message.certainty.concentration = token.certainty
        for each in token.alternatives:
            message.alternatives.add(
                token_id=each.token_id, text=each.text, logprob=each.logprob, bytes=each.piece
            )


def duration(seconds: float) -> duration_pb2.Duration:
    message = duration_pb2.Duration()
    fill_duration(message, seconds)
    return message


def image_info(value: ImageProperties) -> media_pb2.ImageInfo:
    return media_pb2.ImageInfo(
        image_id=value.image_id,
        width=value.width,
        height=value.height,
        cache_hit=value.cache_hit,
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


# ---------------------------------------------------------------- the engine


def decode_steps(stats: PipelineStats) -> admin_pb2.DecodeSteps:
    values = msgspec.structs.asdict(stats)
    same = {name: values[name] for name in _DECODE_STEPS & values.keys()}
    return admin_pb2.DecodeSteps(steps=stats.num_steps, tokens=stats.num_tokens, **same)


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


def _timeline_span(span: LaunchSpan) -> admin_pb2.TimelineSpan:
    values = msgspec.structs.asdict(span)
    start, duration = values.pop("start"), values.pop("duration")
    return admin_pb2.TimelineSpan(start_ns=start, duration_ns=duration, **values)


# ---------------------------------------------------------------- events


def queued(output: QueuePosition) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        queued=inference_pb2.Queued(
            position=output.position, estimated_wait=duration(output.estimated_wait)
        )
    )


def started(output: PrefillStarted, request_id: str) -> inference_pb2.GenerateResponse:
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
        case TextEvent():
            message.text.text = event.text
            fill_tokens(message.text.tokens, event.tokens)
        case PointEvent():
            skills.fill_pointed(message.point, event)
        case ObjectEvent():
            skills.fill_object(message.object, event)
        case ReasoningEvent():
            message.reasoning.text = event.text
            message.reasoning.grounding.extend(map(skills.grounding, event.grounding))
            fill_tokens(message.reasoning.tokens, event.tokens)
        case TokensEvent():
            fill_tokens(message.tokens.tokens, event.tokens)
        case OutlineEvent():
            message.outline.index = event.index
            message.outline.path_delta = event.path_delta
            if event.box is not None:
                message.outline.box.CopyFrom(skills.box(event.box))
    return message
