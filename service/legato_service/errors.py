"""The mapping of every `LegatoError` to a gRPC status with google.rpc details.

A passed deadline has no reason, as when gRPC itself finds it. Details stay under 4 KB, because
proxies and peers may refuse larger trailers.
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
MAX_TEXT = 256  # characters of one text: 4 bytes each still fit the 4 KB
MAX_METADATA = 8  # entries of ErrorInfo.metadata
MIN_RETRY, MAX_RETRY = 0.05, 10.0  # seconds


class SharedMemoryForbidden(errors.LegatoError):
    """Images in shared memory are off, or this one must not be read."""


class SharedMemoryTorn(errors.LegatoError):
    """An image was overwritten while it was read."""


class RequestIdInUse(errors.LegatoError):
    """A request with this id is in flight or was answered."""


class SessionsFull(errors.Overloaded):
    """The limit of open sessions is reached."""


class CredentialRejected(errors.LegatoError):
    """The call brings no credential, or one that is not valid."""


class Forbidden(errors.LegatoError):
    """The credential does not allow this; `metadata` has the `scope` or the `field`."""


class MethodUnknown(errors.LegatoError):
    """Raised for a method that this server does not have."""


@dataclasses.dataclass(frozen=True, slots=True)
class StatusMapping:
    """The status of one type of error.

    `reason` is an `ErrorReason` without its prefix, or empty. `retry_after` (seconds) adds
    RetryInfo and the pushback trailer.
    """

    code: grpc.StatusCode
    reason: str
    detail: Callable[[errors.LegatoError, str], Message] | None = None
    retry_after: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A failure as the client sees it."""

    code: grpc.StatusCode
    reason: str
    status: status_pb2.Status
    retry_after: float | None

    @property
    def message(self) -> str:
        return self.status.message

    def trailers(self) -> tuple[tuple[str, str | bytes], ...]:
        """Return the details and, for retryable failures, the pushback."""
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
    subject = error.metadata.get("task") or error.metadata.get("region", "")
    violation = error_details_pb2.PreconditionFailure.Violation(
        type=reason, subject=_cut(subject), description=_cut(error.message)
    )
    return error_details_pb2.PreconditionFailure(violations=[violation])


def _quota(error: errors.LegatoError, reason: str) -> Message:
    subject = error.metadata.get("caller", "")
    if not subject:
        kind = "credential" if "credential" in error.metadata else "tenant"
        subject = f"{kind}:{error.metadata.get(kind, '')}"
    violation = error_details_pb2.QuotaFailure.Violation(
        subject=_cut(subject), description=_cut(error.message)
    )
    return error_details_pb2.QuotaFailure(violations=[violation])


_C = grpc.StatusCode
STATUS_MAPPINGS: dict[type[errors.LegatoError], StatusMapping] = {
    errors.InvalidRequest: StatusMapping(_C.INVALID_ARGUMENT, "INVALID_FIELD", _bad_request),
    errors.SessionOutOfOrder: StatusMapping(_C.INVALID_ARGUMENT, "SESSION_PROTOCOL", _bad_request),
    errors.ImageUndecodable: StatusMapping(_C.INVALID_ARGUMENT, "IMAGE_UNDECODABLE", _bad_request),
    errors.ImageTooLarge: StatusMapping(_C.INVALID_ARGUMENT, "IMAGE_TOO_LARGE", _bad_request),
    errors.PromptTooLong: StatusMapping(_C.INVALID_ARGUMENT, "PROMPT_TOO_LONG", _bad_request),
    errors.AdapterUnusable: StatusMapping(_C.INVALID_ARGUMENT, "INVALID_FIELD", _bad_request),
    errors.ImageNotFound: StatusMapping(_C.NOT_FOUND, "IMAGE_NOT_FOUND", _resource),
    errors.ModelNotFound: StatusMapping(_C.NOT_FOUND, "MODEL_NOT_FOUND", _resource),
    errors.AdapterNotFound: StatusMapping(_C.NOT_FOUND, "ADAPTER_NOT_FOUND", _resource),
    errors.TaskUnsupported: StatusMapping(
        _C.FAILED_PRECONDITION, "TASK_UNSUPPORTED", _precondition
    ),
    SharedMemoryForbidden: StatusMapping(_C.FAILED_PRECONDITION, "SHM_REFUSED", _precondition),
    SharedMemoryTorn: StatusMapping(_C.ABORTED, "SHM_TORN"),
    RequestIdInUse: StatusMapping(_C.ALREADY_EXISTS, "DUPLICATE_REQUEST", _resource),
    errors.Overloaded: StatusMapping(_C.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after=1.0),
    SessionsFull: StatusMapping(_C.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after=1.0),
    errors.QuotaExceeded: StatusMapping(
        _C.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", _quota, retry_after=1.0
    ),
    errors.BytesExceeded: StatusMapping(_C.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", _quota),
    errors.DeadlineExceeded: StatusMapping(_C.DEADLINE_EXCEEDED, ""),
    errors.DeadlineUnreachable: StatusMapping(_C.DEADLINE_EXCEEDED, "DEADLINE_UNREACHABLE"),
    errors.ClientTooSlow: StatusMapping(_C.ABORTED, "CLIENT_TOO_SLOW"),
    errors.StoppedByOperator: StatusMapping(_C.ABORTED, "PREEMPTED"),
    errors.EngineStarting: StatusMapping(_C.UNAVAILABLE, "ENGINE_STARTING", retry_after=0.5),
    errors.EngineLost: StatusMapping(_C.UNAVAILABLE, "ENGINE_LOST", retry_after=0.5),
    errors.Draining: StatusMapping(_C.UNAVAILABLE, "DRAINING", retry_after=0.2),
    CredentialRejected: StatusMapping(_C.UNAUTHENTICATED, "UNAUTHENTICATED"),
    Forbidden: StatusMapping(_C.PERMISSION_DENIED, "FORBIDDEN"),
    MethodUnknown: StatusMapping(_C.UNIMPLEMENTED, ""),
    errors.LegatoError: StatusMapping(_C.INTERNAL, "INTERNAL"),
    errors.NumericError: StatusMapping(_C.INTERNAL, "NUMERIC"),
    errors.PoisonedRequest: StatusMapping(_C.INTERNAL, "POISONED"),
}
"""Statuses by error type; a type without an entry uses its nearest base."""


def status_mapping(kind: type[errors.LegatoError]) -> StatusMapping:
    return next(STATUS_MAPPINGS[base] for base in kind.__mro__ if base in STATUS_MAPPINGS)


def failure(error: Exception, request_id: str) -> Failure:
    """Return the failure to report; the client does not see the text of an internal error."""
    known = error if isinstance(error, errors.LegatoError) else None
    known = known or errors.exhaustion(error) or errors.InternalError()
    mapping = status_mapping(type(known))
    if mapping is STATUS_MAPPINGS[errors.LegatoError]:
        known = errors.InternalError("internal error; the server logged it with this request id")
    retry_after = _retry_after(mapping, known)
    details: list[Message] = [error_details_pb2.RequestInfo(request_id=request_id)]
    if mapping.reason:
        details.append(_error_info(mapping, known))
    if mapping.detail is not None:
        details.append(mapping.detail(known, mapping.reason))
    if retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(retry_after * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(
        code=mapping.code.value[0],
        message=_sentence(known),
        details=[_packed(detail) for detail in details],
    )
    return Failure(mapping.code, mapping.reason, status, retry_after)


def _sentence(error: errors.LegatoError) -> str:
    field = error.metadata.get("field")
    return _cut(f"{field}: {error.message}" if field else error.message)


def _error_info(mapping: StatusMapping, error: errors.LegatoError) -> Message:
    kept = list(error.metadata.items())[:MAX_METADATA]
    metadata = {_cut(key, 64): _cut(value, 64) for key, value in kept}
    return error_details_pb2.ErrorInfo(reason=mapping.reason, domain=DOMAIN, metadata=metadata)


def _retry_after(mapping: StatusMapping, error: errors.LegatoError) -> float | None:
    """Return the delay in seconds, with jitter so that clients do not retry all at once."""
    if mapping.retry_after is None:
        return None
    hint = error.metadata.get("retry_after_ms")
    seconds = float(hint) / 1000 if hint is not None else mapping.retry_after
    return min(max(seconds * random.uniform(0.8, 1.2), MIN_RETRY), MAX_RETRY)


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _cut(text: str, limit: int = MAX_TEXT) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
