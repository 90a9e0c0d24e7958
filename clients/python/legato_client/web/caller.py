"""As whom a request calls: its token travels on to the Legato server."""

from __future__ import annotations

import contextvars
import hashlib
import re
import time
from collections.abc import Callable
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from legato_client._async_client import AsyncClient
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
        Refused: it is malformed or of another scheme, so that it must not be taken for none.
    """
    scheme, _, found = headers.get("authorization", "").strip().partition(" ")
    if not scheme:
        found = headers.get("x-moondream-auth", "")
    elif scheme.lower() != _SCHEME:
        raise _refusal("the scheme of Authorization is not served: send Bearer TOKEN")
    if _FORM.fullmatch(found.strip()) is None:
        raise _refusal("a token is 1 to 8192 printable ASCII characters without spaces")
    return found.strip()


class CallerMiddleware:
    """Makes `token()` that of each request, in all tasks that answer it.

    On the paths in `free` none is required, and one that is malformed is taken for none.
    """

    def __init__(self, app: ASGIApp, *, required: bool, free: frozenset[str]) -> None:
        self._app = app
        self._required = required
        self._free = free

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            found = ""
            try:
                found = token_of(Headers(scope=scope))
                if self._required and not found:
                    raise _refusal("send a token: Authorization: Bearer TOKEN")
            except Refused as refusal:
                if scope["path"] not in self._free:
                    await response_of(refusal)(scope, receive, send)
                    return
            _TOKEN.set(found)
        await self._app(scope, receive, send)


class TokenCheck:
    """Asks the server whether it accepts the token of the request that is being answered.

    A token that was accepted is not asked for again at once: the request's own call is checked in
    any case, so this decides only whether a body is read.
    """

    PERIOD = 10.0  # seconds
    _MAX_KNOWN = 1024

    def __init__(self, client: AsyncClient, *, timeout: float = 10.0) -> None:
        self._client = client
        self._timeout = timeout
        self._asked_again: dict[bytes, float] = {}  # by a token's hash, oldest first

    async def __call__(self) -> None:
        """Raises LegatoError."""
        key = hashlib.sha256(token().encode()).digest()
        if self._asked_again.get(key, 0.0) > time.monotonic():
            return
        await self._client.server_info(timeout=self._timeout)
        self._asked_again.pop(key, None)
        if len(self._asked_again) >= self._MAX_KNOWN:
            del self._asked_again[next(iter(self._asked_again))]
        self._asked_again[key] = time.monotonic() + self.PERIOD


class HostCheck:
    """Refuses a Host that is no name of this host.

    A page in a browser can reach this host under a name of its own, which the browser then takes
    for the page's.
    """

    def __init__(self, app: ASGIApp, *, allowed: Callable[[str], bool]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            host = Headers(scope=scope).get("host", "")
            if not self._allowed(host):
                refusal = Refused("the Host is not a name of this host", code="wrong_host")
                await response_of(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _refusal(message: str) -> Refused:
    return Refused(message, status=HTTPStatus.UNAUTHORIZED, code="unauthenticated")
