"""Failures as HTTP answers in OpenAI's form."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from legato_client import _errors
from legato_client._proto import skills

CLIENT_CLOSED_REQUEST = 499
"""Client closed the request, in nginx's numbering."""

STATUSES: Mapping[str, int] = {
    "CANCELLED": CLIENT_CLOSED_REQUEST,
    "UNKNOWN": HTTPStatus.INTERNAL_SERVER_ERROR,
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "DEADLINE_EXCEEDED": HTTPStatus.GATEWAY_TIMEOUT,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "ALREADY_EXISTS": HTTPStatus.CONFLICT,
    "PERMISSION_DENIED": HTTPStatus.FORBIDDEN,
    "RESOURCE_EXHAUSTED": HTTPStatus.TOO_MANY_REQUESTS,
    "FAILED_PRECONDITION": HTTPStatus.BAD_REQUEST,
    "ABORTED": HTTPStatus.CONFLICT,
    "OUT_OF_RANGE": HTTPStatus.BAD_REQUEST,
    "UNIMPLEMENTED": HTTPStatus.NOT_IMPLEMENTED,
    "INTERNAL": HTTPStatus.INTERNAL_SERVER_ERROR,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "DATA_LOSS": HTTPStatus.INTERNAL_SERVER_ERROR,
    "UNAUTHENTICATED": HTTPStatus.UNAUTHORIZED,
}
"""HTTP statuses by gRPC status, as google.rpc.Code maps them."""

_NO_MEMBERS: Mapping[str, str] = {}
_MESSAGES = ("task.", *(f"{name}." for name in skills.BY_NAME), "sampling.", "options.")

_KINDS: tuple[tuple[type[_errors.LegatoError], str], ...] = (
    (_errors.Unauthenticated, "authentication_error"),
    (_errors.PermissionDenied, "permission_error"),
    (_errors.NotFound, "not_found_error"),
    (_errors.ResourceExhausted, "rate_limit_error"),
    (_errors.InvalidArgument, "invalid_request_error"),
)


class ReaderLeft(Exception):
    """The HTTP client closed its connection, and the work for it was cancelled."""


class ErrorDetails(msgspec.Struct):
    """`param`: the member of the body that is wrong. `code`: the reason, else gRPC's status."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorDocument(msgspec.Struct):
    """Error body of every failed request."""

    error: ErrorDetails


@dataclasses.dataclass(eq=False)
class RejectedRequest(Exception):
    """Request that is not passed on. `field` names the body's member that is wrong."""

    message: str
    _: dataclasses.KW_ONLY
    field: str | None = None
    status: int = HTTPStatus.BAD_REQUEST
    code: str = "invalid_field"
    retry_after: float | None = None


def status_of(error: _errors.LegatoError) -> int:
    if error.reason == "IMAGE_TOO_LARGE":
        return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    return STATUSES.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)


def document_of(
    error: _errors.LegatoError | RejectedRequest, members: Mapping[str, str] = _NO_MEMBERS
) -> ErrorDocument:
    """Return the body of the answer, also sent inside a stream that has begun.

    `members` are the request body's names of what the contract calls otherwise.
    """
    if isinstance(error, RejectedRequest):
        return _document(error.message, _kind_of_status(error.status), error.field, error.code)
    fields = error.field_violations
    kind = next((name for cls, name in _KINDS if isinstance(error, cls)), "")
    return _document(
        error.message,
        kind or _kind_of_status(status_of(error)),
        _member(fields[0].field, members) if fields else None,
        (error.reason or error.code).lower(),
    )


def response_of(
    error: _errors.LegatoError | RejectedRequest, members: Mapping[str, str] = _NO_MEMBERS
) -> Response:
    status = error.status if isinstance(error, RejectedRequest) else status_of(error)
    headers: dict[str, str] = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after))
    if isinstance(error, _errors.LegatoError):
        if error.request_id:
            headers["x-request-id"] = error.request_id
        if not _may_be_repeated(error):
            headers["x-should-retry"] = "false"
    if status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    return _response(document_of(error, members), status, headers)


async def on_legato_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, _errors.LegatoError | RejectedRequest)
    response = response_of(error, getattr(request.state, "members", _NO_MEMBERS))
    if "x-request-id" not in response.headers and (named := request.headers.get("x-request-id")):
        response.headers["x-request-id"] = named
    return response


async def on_http_exception(_request: Request, error: Exception) -> Response:
    """Answer the router's own refusals: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    kind = _kind_of_status(error.status_code)
    document = _document(error.detail, kind, None, HTTPStatus(error.status_code).name.lower())
    return _response(document, error.status_code, error.headers)


async def on_reader_left(_request: Request, _error: Exception) -> Response:
    """Answer a request whose client is gone, for proxy logs."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def on_bug(_request: Request, _error: Exception) -> Response:
    """Answer 500; the details are in this process's log."""
    document = _document("a bug of this HTTP server", "server_error", None, "internal")
    return _response(document, HTTPStatus.INTERNAL_SERVER_ERROR, {"x-should-retry": "false"})


def _member(field: str, members: Mapping[str, str]) -> str:
    """Convert a field of the contract to the HTTP body's name, which has no outer messages."""
    for message in _MESSAGES:
        field = field.removeprefix(message)
    name, dot, rest = field.partition(".")
    return f"{members.get(name, name)}{dot}{rest}"


def _may_be_repeated(error: _errors.LegatoError) -> bool:
    """Return whether OpenAI's clients may retry: by default they do for 408, 409, 429 and 5xx.

    A request that ends engines must not be sent again, and one that an operator stopped, too.
    """
    never = isinstance(error, _errors.InternalError | _errors.Preempted)
    return not never and error.code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED")


def _document(message: str, kind: str, field: str | None, code: str) -> ErrorDocument:
    return ErrorDocument(ErrorDetails(message, kind, field, code))


def _response(document: ErrorDocument, status: int, headers: Mapping[str, str] | None) -> Response:
    return Response(msgspec.json.encode(document), status, headers, "application/json")


def _kind_of_status(status: int) -> str:
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return "server_error"
    return "authentication_error" if status == HTTPStatus.UNAUTHORIZED else "invalid_request_error"
