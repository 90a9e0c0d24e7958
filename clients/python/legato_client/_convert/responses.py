"""Protobuf responses to Python values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import repeat
from typing import Any

from legato.v1 import inference_pb2, task_pb2

from legato_client import _errors
from legato_client._convert import pieces, skills
from legato_client._errors import LegatoError
from legato_client._values import events, results

TaskOutcome = results.Result | LegatoError


def run_tasks(response: inference_pb2.RunTasksResponse) -> tuple[TaskOutcome, ...]:
    """In the order of the tasks; a failed task is its error, not raised."""
    info = pieces.info(response.info)
    tokens = [pieces.tokens(each.tokens) for each in response.tokens]
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


def _queued(message: inference_pb2.Queued) -> events.Queued:
    return events.Queued(message.position, pieces.seconds(message.estimated_wait))


def _started(message: inference_pb2.Started) -> events.Started:
    return events.Started(
        request_id=message.request_id,
        model=message.model,
        input_tokens=message.input_tokens,
        cached_tokens=message.cached_tokens,
        image=pieces.image_info(message.image) if message.HasField("image") else None,
        queue_time=pieces.seconds(message.queue_time),
    )


def _finished(message: inference_pb2.Finished) -> events.Finished:
    ended = outcome(message.result, pieces.info(message.info))
    if isinstance(ended, LegatoError):
        raise ended
    return events.Finished(ended)


def _text_delta(message: inference_pb2.TextDelta) -> events.TextDelta:
    return events.TextDelta(message.text, pieces.tokens(message.tokens))


def _tokens_delta(message: inference_pb2.TokensDelta) -> events.TokensDelta:
    return events.TokensDelta(pieces.tokens(message.tokens))


def _reasoning_delta(message: inference_pb2.ReasoningDelta) -> events.ReasoningDelta:
    return events.ReasoningDelta(
        text=message.text,
        grounding=tuple(map(pieces.grounding, message.grounding)),
        tokens=pieces.tokens(message.tokens),
    )


def _outline_delta(message: inference_pb2.OutlineDelta) -> events.OutlineDelta:
    box = pieces.box(message.box) if message.HasField("box") else None
    return events.OutlineDelta(message.index, message.path_delta, box)


_EVENTS: dict[str, Callable[[Any], events.Event]] = {
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
