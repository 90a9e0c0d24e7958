"""As whom a request calls: its token travels on to the Legato server."""

from __future__ import annotations

import contextvars
import re
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from legato_client.web.errors import Refused, response_of

_TOKEN: contextvars.ContextVar[str] = contextvars.ContextVar("legato_caller_token", default="")
_FORM = re.compile(r"[\x21-\x7e]{0,8192}")
_SCHEME = "bearer"


def token() -> str:
    """The token of the request that is being answered, or "" where it has none."""
    return _TOKEN.get()


def token_of(headers: Headers) -> str:
    """That of `Authorization: Bearer`, or of Moondream's own header; "" without one.

    Raises:
        Refused: it is malformed, so that it must not be taken for none.
    """
    scheme, _, found = headers.get("authorization", "").partition(" ")
    if scheme.lower() != _SCHEME:
        found = headers.get("x-moondream-auth", "")
    if _FORM.fullmatch(found.strip()) is None:
        raise _refusal("a token is 1 to 8192 printable ASCII characters without spaces")
    return found.strip()


class CallerMiddleware:
    """Makes `token()` that of each request, in all tasks that answer it.

    `required` holds for paths other than those in `free`.
    """

    def __init__(self, app: ASGIApp, *, required: bool, free: frozenset[str]) -> None:
        self._app = app
        self._required = required
        self._free = free

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            try:
                found = token_of(Headers(scope=scope))
                if self._required and not found and scope["path"] not in self._free:
                    raise _refusal("send a token: Authorization: Bearer TOKEN")
            except Refused as refusal:
                await response_of(refusal)(scope, receive, send)
                return
            _TOKEN.set(found)
        await self._app(scope, receive, send)


def _refusal(message: str) -> Refused:
    return Refused(message, status=HTTPStatus.UNAUTHORIZED, code="unauthenticated")
