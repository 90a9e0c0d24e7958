"""The one table: every `LegatoError` as a gRPC status with google.rpc details.

A status carries `RequestInfo`, the `ErrorInfo` of its reason, and the detail that its row names. A
deadline that passed has no reason, as when gRPC itself finds it passed. Details stay under 4 KB:
larger ones travel in a trailer that proxies and peers may refuse.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from legato_engine import errors

DOMAIN = "legato"
MAX_TEXT = 256  # characters of any one text in a status: 4 bytes each still fit the 4 KB
MAX_METADATA = 8  # entries of ErrorInfo.metadata
MIN_RETRY, MAX_RETRY = 0.05, 10.0  # seconds


class SharedMemoryRefused(errors.LegatoError):
    """Shared-memory pictures are off, or this one may not be read; only the service raises this."""


class SharedMemoryTorn(errors.LegatoError):
    """A picture was written while it was read; only the service raises this."""


class DuplicateRequest(errors.LegatoError):
    """A request with this id is in flight; only the service raises this."""


class SessionsFull(errors.Busy):
    """As many sessions are open as may be; only the service raises this."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    `reason` names a value of `legato.v1.ErrorReason` without its prefix, or is empty. `retry_after`
    seconds adds RetryInfo and the pushback trailer.
    """

    code: grpc.StatusCode
    reason: str
    detail: Callable[[errors.LegatoError, str], Message] | None = None
    retry_after: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A failure as the peer sees it."""

    code: grpc.StatusCode
    reason: str
    status: status_pb2.Status
    retry_after: float | None

    @property
    def message(self) -> str:
        """Human-readable; what failed and the limit."""
        return self.status.message

    def trailers(self) -> tuple[tuple[str, str | bytes], ...]:
        """Trailing metadata that carries the details and, for retryable failures, the pushback."""
        details = ("grpc-status-details-bin", self.status.SerializeToString())
        if self.retry_after is None:
            return (details,)
        return (details, ("grpc-retry-pushback-ms", str(round(self.retry_after * 1000))))


def _bad_request(error: errors.LegatoError, reason: str) -> Message:
    violation = error_details_pb2.BadRequest.FieldViolation(
        field=_cut(error.metadata.get("field", "")), description=_cut(error.message), reason=reason
    )
    return error_details_pb2.BadRequest(field_violations=[violation])


def _resource(error: errors.LegatoError, reason: str) -> Message:
    return error_details_pb2.ResourceInfo(
        resource_type=reason.partition("_")[0].lower(),
        resource_name=_cut(error.metadata.get("resource", "")),
        description=_cut(error.message),
    )


def _precondition(error: errors.LegatoError, reason: str) -> Message:
    violation = error_details_pb2.PreconditionFailure.Violation(
        type=reason, subject=_cut(_subject(error)), description=_cut(error.message)
    )
    return error_details_pb2.PreconditionFailure(violations=[violation])


def _quota(error: errors.LegatoError, reason: str) -> Message:
    subject = error.metadata.get("caller") or f"tenant:{error.metadata.get('tenant', '')}"
    violation = error_details_pb2.QuotaFailure.Violation(
        subject=_cut(subject), description=_cut(error.message)
    )
    return error_details_pb2.QuotaFailure(violations=[violation])


def _subject(error: errors.LegatoError) -> str:
    return next((error.metadata[key] for key in ("task", "region") if key in error.metadata), "")


_C = grpc.StatusCode
TABLE: dict[type[errors.LegatoError], Row] = {
    errors.InvalidRequest: Row(_C.INVALID_ARGUMENT, "INVALID_FIELD", _bad_request),
    errors.SessionProtocol: Row(_C.INVALID_ARGUMENT, "SESSION_PROTOCOL", _bad_request),
    errors.ImageUndecodable: Row(_C.INVALID_ARGUMENT, "IMAGE_UNDECODABLE", _bad_request),
    errors.ImageTooLarge: Row(_C.INVALID_ARGUMENT, "IMAGE_TOO_LARGE", _bad_request),
    errors.PromptTooLong: Row(_C.INVALID_ARGUMENT, "PROMPT_TOO_LONG", _bad_request),
    errors.AdapterUnusable: Row(_C.INVALID_ARGUMENT, "INVALID_FIELD", _bad_request),
    errors.ImageNotFound: Row(_C.NOT_FOUND, "IMAGE_NOT_FOUND", _resource),
    errors.ModelNotFound: Row(_C.NOT_FOUND, "MODEL_NOT_FOUND", _resource),
    errors.AdapterNotFound: Row(_C.NOT_FOUND, "ADAPTER_NOT_FOUND", _resource),
    errors.TaskUnsupported: Row(_C.FAILED_PRECONDITION, "TASK_UNSUPPORTED", _precondition),
    SharedMemoryRefused: Row(_C.FAILED_PRECONDITION, "SHM_REFUSED", _precondition),
    SharedMemoryTorn: Row(_C.ABORTED, "SHM_TORN"),
    DuplicateRequest: Row(_C.ALREADY_EXISTS, "DUPLICATE_REQUEST", _resource),
    errors.Busy: Row(_C.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after=1.0),
    SessionsFull: Row(_C.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after=1.0),
    errors.QuotaExceeded: Row(_C.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", _quota, retry_after=1.0),
    errors.BytesExceeded: Row(_C.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", _quota),
    errors.DeadlineExceeded: Row(_C.DEADLINE_EXCEEDED, ""),
    errors.DeadlineUnreachable: Row(_C.DEADLINE_EXCEEDED, "DEADLINE_UNREACHABLE"),
    errors.ClientTooSlow: Row(_C.ABORTED, "CLIENT_TOO_SLOW"),
    errors.Preempted: Row(_C.ABORTED, "PREEMPTED"),
    errors.EngineStarting: Row(_C.UNAVAILABLE, "ENGINE_STARTING", retry_after=1.0),
    errors.EngineLost: Row(_C.UNAVAILABLE, "ENGINE_LOST", retry_after=0.5),
    errors.Draining: Row(_C.UNAVAILABLE, "DRAINING", retry_after=0.2),
    errors.LegatoError: Row(_C.INTERNAL, "INTERNAL"),
}
"""Rows by type; a type without a row takes the nearest base's."""


def row_of(kind: type[errors.LegatoError]) -> Row:
    """The row of an error type, by its nearest base in the table."""
    return next(TABLE[base] for base in kind.__mro__ if base in TABLE)


def failure(error: Exception, request_id: str) -> Failure:
    """What the peer is told about `error`; a bug's text is never part of it."""
    known = error if isinstance(error, errors.LegatoError) else errors.InternalError()
    row = row_of(type(known))
    if row.code is grpc.StatusCode.INTERNAL:
        known = errors.InternalError("internal error; the log has it under this request id")
    retry_after = _retry_after(row, known)
    details: list[Message] = [error_details_pb2.RequestInfo(request_id=request_id)]
    if row.reason:
        details.append(_error_info(row, known))
    if row.detail is not None:
        details.append(row.detail(known, row.reason))
    if retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(retry_after * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(
        code=row.code.value[0],
        message=_sentence(known),
        details=[_packed(detail) for detail in details],
    )
    return Failure(row.code, row.reason, status, retry_after)


def _sentence(error: errors.LegatoError) -> str:
    field = error.metadata.get("field")
    return _cut(f"{field}: {error.message}" if field else error.message)


def _error_info(row: Row, error: errors.LegatoError) -> Message:
    kept = list(error.metadata.items())[:MAX_METADATA]
    metadata = {_cut(key, 64): _cut(value, 64) for key, value in kept}
    return error_details_pb2.ErrorInfo(reason=row.reason, domain=DOMAIN, metadata=metadata)


def _retry_after(row: Row, error: errors.LegatoError) -> float | None:
    """Seconds until a retry may help, spread so that refused clients do not all return at once."""
    if row.retry_after is None:
        return None
    hint = error.metadata.get("retry_after_ms")
    seconds = float(hint) / 1000 if hint is not None else row.retry_after
    return min(max(seconds * random.uniform(0.8, 1.2), MIN_RETRY), MAX_RETRY)


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _cut(text: str, limit: int = MAX_TEXT) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
