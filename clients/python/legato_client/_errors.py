"""Errors that a call can end with.

`LegatoError.reason` is finer than the class and stable: "QUEUE_FULL", "IMAGE_TOO_LARGE", ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from typing import cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

DETAILS_KEY = "grpc-status-details-bin"
REQUEST_ID_KEY = "x-request-id"


@dataclasses.dataclass(frozen=True, slots=True)
class FieldViolation:
    """Request field and its error."""

    field: str
    description: str


class LegatoError(Exception):
    """Base of all failures.

    `code` is the gRPC status name, `reason` the server's `ErrorReason` or empty, `metadata` holds
    limits and actual values, `retry_after` is in seconds.
    """

    code = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        code: str = "",
        reason: str = "",
        request_id: str = "",
        metadata: Mapping[str, str] | None = None,
        field_violations: tuple[FieldViolation, ...] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.reason = reason
        self.request_id = request_id
        self.metadata: dict[str, str] = dict(metadata or {})
        self.field_violations = field_violations
        self.retry_after = retry_after

    def __str__(self) -> str:
        tags = [self.reason or self.code]
        if self.request_id:
            tags.append(f"request {self.request_id}")
        return f"{self.message} [{', '.join(tags)}]"


class InvalidArgument(LegatoError):
    """The caller must change the request; `field_violations` says where."""

    code = "INVALID_ARGUMENT"


class SessionProtocol(InvalidArgument):
    """A session message came out of order, or a frame's sequence did not grow."""


class NotFound(LegatoError):
    """A named model, adapter or image does not exist on this server."""

    code = "NOT_FOUND"


class ImageNotFound(NotFound):
    """The image is not held, or not any more: send it again."""


class AlreadyExists(LegatoError):
    """The named object exists already."""

    code = "ALREADY_EXISTS"


class DuplicateRequest(AlreadyExists):
    """The request id names a request of other content, or a stream."""


class FailedPrecondition(LegatoError):
    """This server cannot do the task, whatever the arguments."""

    code = "FAILED_PRECONDITION"


class ClientTooOld(FailedPrecondition):
    """The server serves newer clients only; `metadata` holds both contract revisions."""


class SharedMemoryRefused(FailedPrecondition):
    """The server cannot read this shared memory: send the bytes."""


class UnencryptedToken(FailedPrecondition):
    """A token would leave this host unencrypted. Raised before anything is sent."""


class ResourceExhausted(LegatoError):
    """A limit of the transport or of a proxy on the way."""

    code = "RESOURCE_EXHAUSTED"


class Busy(ResourceExhausted):
    """The server is full or a quota is used up: come back after `retry_after`."""


class QuotaExceeded(Busy):
    """The caller's own share is used up."""


class DeadlineExceeded(LegatoError):
    """The deadline passed, or could not be met."""

    code = "DEADLINE_EXCEEDED"


class Cancelled(LegatoError):
    """The call was cancelled."""

    code = "CANCELLED"


class Aborted(LegatoError):
    """The server aborted the call: the client read too slowly, or a shared frame was torn."""

    code = "ABORTED"


class Preempted(Aborted):
    """An operator stopped the request."""


class Unavailable(LegatoError):
    """The server is absent, starting or draining, or lost its engine: retry elsewhere or later."""

    code = "UNAVAILABLE"


class IncompleteStream(Unavailable):
    """A stream ended, or skipped a message, before it was complete."""


class Unimplemented(LegatoError):
    """The server was not built with that call."""

    code = "UNIMPLEMENTED"


class Unauthenticated(LegatoError):
    """No credential, or one that is not valid, or not any more."""

    code = "UNAUTHENTICATED"


class PermissionDenied(LegatoError):
    """The credential lacks the scope that `metadata` names."""

    code = "PERMISSION_DENIED"


class InternalError(LegatoError):
    """A bug of the server; give the request id to its operator."""

    code = "INTERNAL"


class Poisoned(InternalError):
    """The engine died each time that it ran this request: do not send it again."""


class Numeric(InternalError):
    """The model computed values that are not numbers for this request."""


_BY_CODE: dict[str, type[LegatoError]] = {cls.code: cls for cls in LegatoError.__subclasses__()}
_BY_CODE |= {"OUT_OF_RANGE": InvalidArgument, "UNKNOWN": InternalError, "DATA_LOSS": InternalError}
_CODE_NAMES = {int(code.value[0]): code.name for code in grpc.StatusCode}
_BY_REASON: dict[str, type[LegatoError]] = {
    "DUPLICATE_REQUEST": DuplicateRequest,
    "IMAGE_NOT_FOUND": ImageNotFound,
    "NUMERIC": Numeric,
    "POISONED": Poisoned,
    "PREEMPTED": Preempted,
    "QUEUE_FULL": Busy,
    "QUOTA_EXCEEDED": QuotaExceeded,
    "SESSION_PROTOCOL": SessionProtocol,
    "SHM_REFUSED": SharedMemoryRefused,
}


def from_rpc_error(error: grpc.RpcError) -> LegatoError:
    failure = cast(grpc.Call, error)  # what sync and asyncio errors have in common
    trailers = dict(failure.trailing_metadata() or ())
    status = status_pb2.Status(code=failure.code().value[0], message=failure.details() or "")
    packed, request_id = trailers.get(DETAILS_KEY), trailers.get(REQUEST_ID_KEY)
    with suppress(DecodeError):
        if isinstance(packed, bytes):
            status.details.extend(status_pb2.Status.FromString(packed).details)
    return from_status(status, request_id if isinstance(request_id, str) else "")


def from_status(status: status_pb2.Status, request_id: str = "") -> LegatoError:
    info = error_details_pb2.ErrorInfo()
    request = error_details_pb2.RequestInfo(request_id=request_id)
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    retry_after: float | None = None
    for detail in status.details:
        with suppress(DecodeError):  # skip damaged details
            for message in (info, request, bad_request, retry):
                detail.Unpack(message)  # no effect when the type differs
    with suppress(ValueError):  # out of the bounds of a duration
        if retry.HasField("retry_delay"):
            retry_after = max(retry.retry_delay.ToNanoseconds() / 1e9, 0.0)
    code = _CODE_NAMES.get(status.code, "UNKNOWN")
    return _class_of(code, info.reason, retry_after is not None)(
        status.message or code,
        code=code,
        reason=info.reason,
        request_id=request.request_id,
        metadata=info.metadata,
        field_violations=tuple(
            FieldViolation(v.field, v.description) for v in bad_request.field_violations
        ),
        retry_after=retry_after,
    )


def _class_of(code: str, reason: str, says_when: bool) -> type[LegatoError]:
    """Return the error's class: by its reason if that fits the code, else by the code."""
    by_code = _BY_CODE.get(code, LegatoError)
    by_reason = _BY_REASON.get(reason, by_code)
    if issubclass(by_reason, by_code) and by_reason is not by_code:
        return by_reason
    return Busy if by_code is ResourceExhausted and says_when else by_code
