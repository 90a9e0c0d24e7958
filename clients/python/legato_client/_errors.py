"""Every failure a call can end in.

    LegatoError
    ├── InvalidArgument        change the request; `field_violations` says where
    ├── NotFound               model, adapter or image unknown here
    ├── AlreadyExists          the request id names another request
    ├── FailedPrecondition     this server cannot do the task
    ├── ResourceExhausted      a limit of the transport or of a proxy
    │   └── Busy               queue full or quota used up; `retry_after` says when to come back
    ├── DeadlineExceeded       the deadline passed, or could not be met
    ├── Cancelled
    ├── Aborted                this client read too slowly, or the work was preempted
    ├── Unavailable            starting, draining, engine lost, or nobody listens
    │   └── IncompleteStream   a stream ended without its `Finished`
    ├── Unimplemented          this server was not built with that call
    ├── Unauthenticated
    ├── PermissionDenied
    └── InternalError          a bug of the server

`reason` is finer than the class and stable: "QUEUE_FULL", "IMAGE_TOO_LARGE", "ENGINE_LOST", ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Protocol, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

DETAILS_KEY = "grpc-status-details-bin"
REQUEST_ID_KEY = "x-request-id"


@dataclasses.dataclass(frozen=True, slots=True)
class FieldViolation:
    """A request field and what is wrong with it."""

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
    """The caller must change the request."""

    code = "INVALID_ARGUMENT"


class NotFound(LegatoError):
    """A named model, adapter or image does not exist on this server."""

    code = "NOT_FOUND"


class AlreadyExists(LegatoError):
    """The request id names another request."""

    code = "ALREADY_EXISTS"


class FailedPrecondition(LegatoError):
    """This server cannot do that, whatever the arguments."""

    code = "FAILED_PRECONDITION"


class ResourceExhausted(LegatoError):
    """A limit of the transport or of a proxy on the way."""

    code = "RESOURCE_EXHAUSTED"


class Busy(ResourceExhausted):
    """The server is full or a quota is used up: come back later."""


class DeadlineExceeded(LegatoError):
    """The deadline passed, or could not be met."""

    code = "DEADLINE_EXCEEDED"


class Cancelled(LegatoError):
    """The call was cancelled."""

    code = "CANCELLED"


class Aborted(LegatoError):
    """The server gave the call up: the client read too slowly, or the work was preempted."""

    code = "ABORTED"


class Unavailable(LegatoError):
    """Nobody serves there now; retry elsewhere or later."""

    code = "UNAVAILABLE"


class IncompleteStream(Unavailable):
    """A stream ended, or skipped an event, without its `Finished`."""


class Unimplemented(LegatoError):
    """This server was not built with that call."""

    code = "UNIMPLEMENTED"


class Unauthenticated(LegatoError):
    """No credentials, or bad ones."""

    code = "UNAUTHENTICATED"


class PermissionDenied(LegatoError):
    """The credentials lack the scope."""

    code = "PERMISSION_DENIED"


class InternalError(LegatoError):
    """A bug of the server; give the request id to its operator."""

    code = "INTERNAL"


_BY_CODE: dict[str, type[LegatoError]] = {cls.code: cls for cls in LegatoError.__subclasses__()}
_BY_CODE |= {"OUT_OF_RANGE": InvalidArgument, "UNKNOWN": InternalError, "DATA_LOSS": InternalError}
_CODE_NAMES = {int(code.value[0]): code.name for code in grpc.StatusCode}
_BUSY_REASONS = frozenset({"QUEUE_FULL", "QUOTA_EXCEEDED"})


class _Failure(Protocol):
    """What sync and asyncio RPC errors share."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


def from_rpc_error(error: grpc.RpcError) -> LegatoError:
    """The typed error of a failed call."""
    failure = cast(_Failure, error)
    trailers = dict(failure.trailing_metadata() or ())
    status = status_pb2.Status(code=failure.code().value[0], message=failure.details() or "")
    status.details.extend(_unpacked(trailers.get(DETAILS_KEY)).details)
    request_id = trailers.get(REQUEST_ID_KEY)
    return from_status(status, request_id if isinstance(request_id, str) else "")


def from_status(status: status_pb2.Status, request_id: str = "") -> LegatoError:
    """The typed error of a `google.rpc.Status`, its details unpacked."""
    info = error_details_pb2.ErrorInfo()
    request = error_details_pb2.RequestInfo(request_id=request_id)
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    retry_after: float | None = None
    for detail in status.details:
        if detail.Unpack(retry):
            retry_after = retry.retry_delay.ToTimedelta().total_seconds()
            continue
        for message in (info, request, bad_request):
            detail.Unpack(message)  # leaves the message alone when the type differs
    code = _CODE_NAMES.get(status.code, "UNKNOWN")
    cls = _BY_CODE.get(code, LegatoError)
    if cls is ResourceExhausted and (info.reason in _BUSY_REASONS or retry_after is not None):
        cls = Busy
    return cls(
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


def _unpacked(packed: str | bytes | None) -> status_pb2.Status:
    """The status of a details trailer; empty when there is none or it is damaged."""
    if not isinstance(packed, bytes):
        return status_pb2.Status()
    try:
        return status_pb2.Status.FromString(packed)
    except DecodeError:
        return status_pb2.Status()
