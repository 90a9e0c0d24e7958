"""Statuses to typed errors."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from legato_client import (
    Aborted,
    AlreadyExists,
    Busy,
    Client,
    DeadlineExceeded,
    DuplicateRequest,
    FailedPrecondition,
    FieldViolation,
    ImageNotFound,
    InternalError,
    InvalidArgument,
    LegatoError,
    NotFound,
    PermissionDenied,
    Preempted,
    QuotaExceeded,
    ResourceExhausted,
    SessionProtocol,
    SharedMemoryRefused,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from legato_client._errors import from_status

from tests.clients.python.failures import Failure, failure, retry_info

Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (Code.INVALID_ARGUMENT, "INVALID_FIELD", InvalidArgument),
        (Code.INVALID_ARGUMENT, "IMAGE_UNDECODABLE", InvalidArgument),
        (Code.NOT_FOUND, "MODEL_NOT_FOUND", NotFound),
        (Code.NOT_FOUND, "IMAGE_NOT_FOUND", ImageNotFound),
        (Code.FAILED_PRECONDITION, "TASK_UNSUPPORTED", FailedPrecondition),
        (Code.FAILED_PRECONDITION, "SHM_REFUSED", SharedMemoryRefused),
        (Code.INVALID_ARGUMENT, "SESSION_PROTOCOL", SessionProtocol),
        (Code.INTERNAL, "PREEMPTED", InternalError),
        (Code.UNIMPLEMENTED, "", Unimplemented),
        (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", Busy),
        (Code.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", QuotaExceeded),
        (Code.RESOURCE_EXHAUSTED, "", ResourceExhausted),
        (Code.ABORTED, "CLIENT_TOO_SLOW", Aborted),
        (Code.ABORTED, "PREEMPTED", Preempted),
        (Code.DEADLINE_EXCEEDED, "DEADLINE_UNREACHABLE", DeadlineExceeded),
        (Code.ALREADY_EXISTS, "DUPLICATE_REQUEST", DuplicateRequest),
        (Code.UNAVAILABLE, "ENGINE_LOST", Unavailable),
        (Code.UNAUTHENTICATED, "UNAUTHENTICATED", Unauthenticated),
        (Code.PERMISSION_DENIED, "FORBIDDEN", PermissionDenied),
        (Code.INTERNAL, "INTERNAL", InternalError),
        (Code.UNKNOWN, "", InternalError),
    ],
)
def test_error_map(code, reason, kind):
    """Each row of the contract's error map has its type, code and reason."""
    error = from_status(failure(code, reason).status())
    assert type(error) is kind
    assert (error.code, error.reason) == (code.name, reason)


def test_details_survive_the_wire(server):
    """Reason, request id, limits, field violations and retry delay reach the caller."""
    violation = error_details_pb2.BadRequest.FieldViolation(field="image", description="too big")
    bad = error_details_pb2.BadRequest(field_violations=[violation])
    server.script["Detect"].append(
        failure(
            Code.INVALID_ARGUMENT, "IMAGE_TOO_LARGE", bad, retry_info(0.5), limit="40", actual="50"
        )
    )
    with Client(server.target) as client, pytest.raises(InvalidArgument) as caught:
        client.detect(b"x", "cat")
    error = caught.value
    assert error.reason == "IMAGE_TOO_LARGE"
    assert error.request_id == "r-9"
    assert error.metadata == {"limit": "40", "actual": "50"}
    assert error.field_violations == (FieldViolation("image", "too big"),)
    assert error.retry_after == 0.5
    assert "r-9" in str(error)


def test_status_without_details(server):
    """A plain status is typed too, with the request id of its trailer."""
    server.script["Detect"].append(
        Failure(Code.NOT_FOUND, "gone", trailers=(("x-request-id", "r-2"),))
    )
    with Client(server.target) as client, pytest.raises(NotFound) as caught:
        client.detect(b"x", "cat")
    assert (caught.value.message, caught.value.request_id) == ("gone", "r-2")


def test_damaged_details(server):
    """Details that are not a Status leave the plain error."""
    broken = (("grpc-status-details-bin", b"\xff\xff"),)
    server.script["Detect"].append(Failure(Code.INTERNAL, "bug", trailers=broken))
    with Client(server.target) as client, pytest.raises(InternalError, match="bug"):
        client.detect(b"x", "cat")


def test_a_damaged_detail():
    """A detail that cannot be parsed is skipped; the others count."""
    status = status_pb2.Status(code=5, message="gone")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="IMAGE_NOT_FOUND"))
    for kind in ("RequestInfo", "BadRequest", "RetryInfo"):
        status.details.add(type_url=f"type.googleapis.com/google.rpc.{kind}", value=b"\xff\xff")
    assert type(from_status(status)) is ImageNotFound


def test_unknown_code():
    """A code that this client does not know is a `LegatoError`, not a crash."""
    assert type(from_status(status_pb2.Status(code=99, message="new"))) is InternalError


def test_tree():
    """A finer error is still the one of its code; Busy is told apart from transport limits."""
    assert issubclass(ImageNotFound, NotFound)
    assert issubclass(DuplicateRequest, AlreadyExists)
    assert issubclass(Preempted, Aborted)
    assert issubclass(QuotaExceeded, Busy)
    assert issubclass(Busy, ResourceExhausted)
    assert not issubclass(Busy, Unavailable)
    assert issubclass(ResourceExhausted, LegatoError)
