"""Every failure Legato can name.

    LegatoError
    ├── InvalidRequest            the caller must change the request
    │   ├── InvalidField          a field is missing, out of range, or contradicts another
    │   ├── SessionProtocol       a session message came out of order
    │   ├── ImageUndecodable      not an image, truncated, mislabelled, zero-sized
    │   ├── ImageTooLarge         over the pixel or byte limit, known from its header
    │   ├── PromptTooLong         prompt and max_tokens do not fit the context or the KV pool
    │   └── AdapterUnusable       a named adapter's file is not one for this model
    ├── NotFound
    │   ├── ImageNotFound
    │   ├── ModelNotFound
    │   └── AdapterNotFound
    ├── TaskUnsupported           this model cannot do the task
    ├── Busy
    │   ├── QueueFull             retry after a while
    │   └── QuotaExceeded         the caller's own share is used up
    │       └── BytesExceeded     of memory, which no waiting gives back
    ├── DeadlineExceeded          the deadline passed
    │   └── DeadlineUnreachable   predicted wait is longer than the time left
    ├── ClientTooSlow             the peer stopped reading its stream
    ├── Preempted                 an operator stopped the request
    ├── Unavailable
    │   ├── EngineStarting
    │   ├── EngineLost            the engine process died with the request in flight
    │   └── Draining
    └── InternalError             a bug; details go to the log, not to the caller

One table, `legato_service.errors`, turns them into gRPC statuses. Errors cross the process line as
`ErrorValue` by class name, so both sides agree without matching text.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class LegatoError(Exception):
    """Base of all; `metadata` carries limits and actual values for machines."""

    def __init__(self, message: str = "", **metadata: str | int | float) -> None:
        super().__init__(message)
        self.message = message
        self.metadata: dict[str, str] = {k: str(v) for k, v in metadata.items()}


class InvalidRequest(LegatoError):
    """The caller must change the request; `metadata["field"]` names where."""


class InvalidField(InvalidRequest):
    """A field is missing, out of range, or contradicts another."""


class SessionProtocol(InvalidRequest):
    """A session message came out of order."""


class ImageUndecodable(InvalidRequest):
    """The bytes are not an image that can be decoded."""


class ImageTooLarge(InvalidRequest):
    """The image is over the pixel or byte limit."""


class PromptTooLong(InvalidRequest):
    """Prompt and max_tokens can never fit."""


class AdapterUnusable(InvalidRequest):
    """The adapter of this name is malformed, too large, or another model's."""


class NotFound(LegatoError):
    """A named thing does not exist; `metadata["resource"]` says which."""


class ImageNotFound(NotFound):
    """No cached image has this id (any more)."""


class ModelNotFound(NotFound):
    """This server does not serve that model."""


class AdapterNotFound(NotFound):
    """This server does not hold that adapter."""


class TaskUnsupported(LegatoError):
    """The served model cannot do this task."""


class Busy(LegatoError):
    """Busy here and now; `metadata["retry_after_ms"]` says when to come back."""


class QueueFull(Busy):
    """The waiting queue is full."""


class QuotaExceeded(Busy):
    """The caller's own share is used up; `metadata` names `quota`, `tenant`, `limit`, `actual`."""


class BytesExceeded(QuotaExceeded):
    """The caller has as many bytes as it may; `metadata` names it as `caller`, not `tenant`."""


class DeadlineExceeded(LegatoError):
    """The request's deadline passed."""


class DeadlineUnreachable(DeadlineExceeded):
    """The predicted wait is longer than the time left."""


class ClientTooSlow(LegatoError):
    """The peer stopped reading its stream."""


class Preempted(LegatoError):
    """An operator stopped the request."""


class Unavailable(LegatoError):
    """Not serving now; retry elsewhere or later."""


class EngineStarting(Unavailable):
    """The engine is loading."""


class EngineLost(Unavailable):
    """The engine process died with the request in flight."""


class Draining(Unavailable):
    """The server is shutting down."""


class InternalError(LegatoError):
    """A bug of ours."""


class ErrorValue(msgspec.Struct, frozen=True, kw_only=True):
    """A `LegatoError` on the wire between the processes."""

    kind: str
    message: str
    metadata: dict[str, str] = {}


def _tree(cls: type[LegatoError]) -> Mapping[str, type[LegatoError]]:
    found = {cls.__name__: cls}
    for child in cls.__subclasses__():
        found.update(_tree(child))
    return found


_KINDS = _tree(LegatoError)


def to_value(error: LegatoError) -> ErrorValue:
    """The wire form of an error."""
    return ErrorValue(kind=type(error).__name__, message=error.message, metadata=error.metadata)


def from_value(value: ErrorValue) -> LegatoError:
    """The error of a wire form; an unknown kind is an `InternalError`."""
    error = _KINDS.get(value.kind, InternalError)(value.message)
    error.metadata = dict(value.metadata)
    return error
