"""The errors of Legato, one tree of classes.

`legato_service.errors` maps them to gRPC statuses. Between processes they are sent as `ErrorValue`
by class name, so that neither side matches text.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping

import msgspec


class LegatoError(Exception):
    """Base of all errors; `metadata` has limits and actual values for programs."""

    def __init__(self, message: str = "", **metadata: str | int | float) -> None:
        super().__init__(message)
        self.message = message
        self.metadata: dict[str, str] = {k: str(v) for k, v in metadata.items()}


class InvalidRequest(LegatoError):
    """The caller must change the request; `metadata["field"]` names the field."""


class InvalidField(InvalidRequest):
    """A field is missing, out of range, or contradicts another."""


class SessionOutOfOrder(InvalidRequest):
    """A session message came out of order."""


class ImageUndecodable(InvalidRequest):
    """The bytes are not an image, truncated, mislabelled, or of no pixels."""


class ImageTooLarge(InvalidRequest):
    """The image is over the pixel or byte limit, by its header."""


class PromptTooLong(InvalidRequest):
    """Prompt and max_tokens exceed the context or the KV pool."""


class AdapterUnusable(InvalidRequest):
    """The named adapter is malformed, too large, or for another model."""


class ResourceNotFound(LegatoError):
    """A named thing does not exist; `metadata["resource"]` says which."""


class ImageNotFound(ResourceNotFound):
    """No image with this id is cached or held."""


class ModelNotFound(ResourceNotFound):
    """This server does not serve that model."""


class AdapterNotFound(ResourceNotFound):
    """This server does not hold that adapter."""


class TaskUnsupported(LegatoError):
    """The served model cannot do this task."""


class Overloaded(LegatoError):
    """Busy; `metadata["retry_after_ms"]` says when to retry."""


class QueueFull(Overloaded):
    """The waiting queue is full, or the host has no room for more."""


class QuotaExceeded(Overloaded):
    """The caller's share is used up; `metadata` has `quota`, `tenant`, `limit`, `actual`."""


class BytesExceeded(QuotaExceeded):
    """The caller's share of memory is used up, which no waiting gives back.

    `metadata` has `caller` instead of `tenant`.
    """


class DeadlineExceeded(LegatoError):
    """The request's deadline passed."""


class DeadlineUnreachable(DeadlineExceeded):
    """The predicted wait is longer than the time left."""


class ClientTooSlow(LegatoError):
    """The peer stopped reading its stream."""


class StoppedByOperator(LegatoError):
    """An operator stopped the request."""


class EngineUnavailable(LegatoError):
    """Not serving now; retry elsewhere or later."""


class EngineStarting(EngineUnavailable):
    """The engine is loading."""


class EngineLost(EngineUnavailable):
    """The engine process died, and no other can take the request over."""


class Draining(EngineUnavailable):
    """The server is shutting down."""


class InternalError(LegatoError):
    """A bug in Legato; details go to the log, not to the caller."""


class NumericError(InternalError):
    """The model computed values for this request that are not finite."""


class PoisonedRequest(InternalError):
    """The engine process died whenever it ran this request, at last with nothing beside it."""


_EXHAUSTED = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EAGAIN,  # of a new process or thread
    }
)


def exhaustion(error: BaseException) -> QueueFull | None:
    """Return the refusal where the host has no descriptors, memory or space left, else None."""
    if not isinstance(error, OSError) or error.errno not in _EXHAUSTED:
        return None
    return QueueFull(f"the host has no room: {os.strerror(error.errno)}", retry_after_ms=1000)


class ErrorValue(msgspec.Struct, frozen=True, kw_only=True):
    """A `LegatoError` as sent between processes."""

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
    return ErrorValue(kind=type(error).__name__, message=error.message, metadata=error.metadata)


def from_value(value: ErrorValue) -> LegatoError:
    """Convert back; an unknown kind becomes an `InternalError`."""
    error = _KINDS.get(value.kind, InternalError)(value.message)
    error.metadata = dict(value.metadata)
    return error
