"""Protobuf responses to Python values."""

from __future__ import annotations

import dataclasses
from itertools import repeat

from legato.v1 import admin_pb2, image_pb2, inference_pb2, server_pb2, session_pb2, task_pb2

from legato_client import _errors
from legato_client._errors import LegatoError
from legato_client._images.sources import HeldImage
from legato_client._proto import pieces, skills
from legato_client._proto.pieces import read
from legato_client._types import results, server

TaskOutcome = results.Result | LegatoError


def run_tasks(response: inference_pb2.RunTasksResponse) -> tuple[TaskOutcome, ...]:
    """Convert outcomes in task order; a failed task is its error, not raised."""
    info = read(results.ResponseInfo, response.info)
    tokens = [read(results.TokensDelta, each).tokens for each in response.tokens]
    return tuple(
        outcome(result, dataclasses.replace(info, tokens=own))
        for result, own in zip(response.results, tokens or repeat(()), strict=False)
    )


def event_of(response: inference_pb2.GenerateResponse) -> results.Event | None:
    """Convert an event; None for a heartbeat or a kind this client does not know.

    Raises the error of a `Finished` whose task failed.
    """
    kind = response.WhichOneof("event")
    if kind == "finished":
        message = response.finished
        ended = outcome(message.result, read(results.ResponseInfo, message.info))
        if isinstance(ended, LegatoError):
            raise ended
        return results.Finished(ended)
    return read(_EVENTS[kind], getattr(response, kind)) if kind in _EVENTS else None


def outcome(result: task_pb2.TaskResult, shared: results.ResponseInfo) -> TaskOutcome:
    """Convert a task's outcome; its own finish reason, usage and timings replace shared ones."""
    reason = pieces.enum_word(task_pb2.FinishReason.DESCRIPTOR, result.finish_reason)
    info = dataclasses.replace(
        shared,
        finish_reason=shared.finish_reason if reason == "unspecified" else reason,
        usage=read(results.Usage, result.usage) if result.HasField("usage") else shared.usage,
        timings=read(results.Timings, result.timings)
        if result.HasField("timings")
        else shared.timings,
    )
    kind = result.WhichOneof("result")
    if kind is None:
        return _errors.InternalError("the server sent a result without content")
    if kind == "error":
        return _errors.from_status(result.error, info.request_id)
    answer: results.Result = skills.BY_NAME[kind].read(getattr(result, kind), info, result.task_id)
    return answer


_EVENTS: dict[str, type[results.Event]] = {
    "queued": results.Queued,
    "started": results.Started,
    "text": results.TextDelta,
    "reasoning": results.ReasoningDelta,
    "point": results.PointedObject,
    "object": results.Detection,
    "outline": results.OutlineDelta,
    "tokens": results.TokensDelta,
}


# ---------------------------------------------------------------- server


def models(response: server_pb2.ListModelsResponse) -> tuple[tuple[server.ModelInfo, ...], str]:
    """Return the models and the next page's token, which is empty at the end."""
    return tuple(read(server.ModelInfo, e) for e in response.models), response.next_page_token


def held_image(response: image_pb2.PutImageResponse) -> HeldImage:
    is_forgotten = response.HasField("expire_time")
    expires = pieces.utc(response.expire_time) if is_forgotten else None
    return read(HeldImage, response.image, expire_time=expires)


# ---------------------------------------------------------------- session


def result(message: session_pb2.FrameResult, model: str) -> server.FrameResult:
    image = read(results.ImageInfo, message.image) if message.HasField("image") else None
    stamp = pieces.stamp(message.stamp)
    shared = results.ResponseInfo("", model, "unspecified", image=image, stamp=stamp)
    return read(
        server.FrameResult,
        message,
        stamp=stamp,
        image=image,
        task_id=message.result.task_id,
        outcome=outcome(message.result, shared),
    )


def delta(message: session_pb2.FrameDelta) -> server.FrameDelta | None:
    """Convert a delta; None for a kind this client does not know."""
    event = event_of(message.event)
    return None if event is None else read(server.FrameDelta, message, event=event)


def go_away(message: session_pb2.SessionGoAway) -> server.GoAway:
    reason = _errors.from_status(message.reason) if message.reason.code else None
    return server.GoAway(pieces.seconds(message.time_left), reason)


# ---------------------------------------------------------------- admin


def timeline(response: admin_pb2.WatchTimelineResponse) -> server.TimelineUpdate:
    spans = []
    for each in response.spans:
        times = {"start": each.start_ns / 1e9, "duration": each.duration_ns / 1e9}
        spans.append(read(server.TimelineSpan, each, **times, engine=response.engine))
    started = response.engine_started_ns / 1e9
    return read(server.TimelineUpdate, response, spans=tuple(spans), engine_started=started)
