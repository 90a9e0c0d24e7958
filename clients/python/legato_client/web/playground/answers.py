"""Events, results and failures as the JSON objects that the page reads.

An object's `type` says what it is; its other keys are the fields of the client's value of that
name. Coordinates are fractions of the picture, times are in seconds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from legato_client._convert import skills
from legato_client._errors import (
    InvalidArgument,
    LegatoError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from legato_client._values.events import (
    Event,
    Finished,
    OutlineDelta,
    Queued,
    ReasoningDelta,
    Started,
    TextDelta,
    TokensDelta,
)
from legato_client._values.results import Detection, PointedObject, Result

Json = dict[str, Any]

_EVENTS: dict[type[Event], str] = {
    Queued: "queued",
    Started: "started",
    TextDelta: "text",
    ReasoningDelta: "reasoning",
    Detection: "object",
    PointedObject: "point",
    OutlineDelta: "outline",
    TokensDelta: "tokens",
}

_REMEDIES = {
    "INVALID_FIELD": "Change the named field and ask again.",
    "IMAGE_UNDECODABLE": "Choose a whole JPEG, PNG or WebP file.",
    "IMAGE_TOO_LARGE": "Choose a smaller picture.",
    "IMAGE_NOT_FOUND": "The server no longer holds the picture: choose it again.",
    "MODEL_NOT_FOUND": "Choose a model that this server serves.",
    "ADAPTER_NOT_FOUND": "Leave the adapter empty, or name one that this server has.",
    "TASK_UNSUPPORTED": "This model lacks the skill: choose another skill or another model.",
    "PROMPT_TOO_LONG": "Shorten the question or the conversation, or lower the most tokens.",
    "QUEUE_FULL": "The server is full: ask again in a moment.",
    "QUOTA_EXCEEDED": "This caller's share is used up: ask less often.",
    "CLIENT_TOO_SLOW": "The answer was not read quickly enough: ask for less.",
    "DEADLINE_UNREACHABLE": "The wait would be longer than the time allowed: ask again later.",
    "DUPLICATE_REQUEST": "A request of this id is known: ask again without it.",
    "ENGINE_STARTING": "The model is loading: ask again in a moment.",
    "ENGINE_LOST": "The engine is being started again: ask again in a moment.",
    "DRAINING": "The server is shutting down: ask another one.",
    "PREEMPTED": "An operator stopped the request: ask again if it still matters.",
    "SHM_REFUSED": "This server reads no shared memory: send the bytes.",
    "SHM_TORN": "The picture changed while it was read: send it again.",
    "SESSION_PROTOCOL": "Start the session again.",
    "UNAUTHENTICATED": "Start the playground with a valid token (--token-file).",
    "FORBIDDEN": "Start the playground with a token that has the scope.",
    "INTERNAL": "This is a bug of the server: report it with the request's id.",
    "POISONED": "The engine died of this request: do not send it again, report it.",
    "NUMERIC": "The model computed no numbers for this request: report it.",
}
"""What to do, by the contract's `ErrorReason`."""

_BY_CLASS: tuple[tuple[type[LegatoError], str], ...] = (
    (InvalidArgument, "Change the request and ask again."),
    (Unavailable, "Is the server running, and is --server its address?"),
    (Unauthenticated, _REMEDIES["UNAUTHENTICATED"]),
    (PermissionDenied, _REMEDIES["FORBIDDEN"]),
)


def event(value: Event) -> Json:
    if isinstance(value, Finished):
        return {"type": "finished", "result": result(value.result)}
    return {"type": _EVENTS[type(value)], **dataclasses.asdict(value)}


def result(value: Result) -> Json:
    return {"type": skills.of(value).name, **dataclasses.asdict(value)}


def failure(error: LegatoError) -> Json:
    """A failure with what can be done about it; `hint` may be empty."""
    return {
        "type": "failed",
        "message": error.message,
        "code": error.code,
        "reason": error.reason,
        "request_id": error.request_id,
        "fields": [dataclasses.asdict(each) for each in error.field_violations],
        "retry_after": error.retry_after,
        "hint": hint(error),
    }


def hint(error: LegatoError) -> str:
    """What can be done about a failure, as a sentence; empty where nothing is known."""
    if error.reason in _REMEDIES:
        return _REMEDIES[error.reason]
    return next((text for kind, text in _BY_CLASS if isinstance(error, kind)), "")
