"""HTTP process of one client: application, listener, caller identity."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import hashlib
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from http import HTTPStatus
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from legato_client._async_client import AsyncClient
from legato_client._errors import LegatoError
from legato_client.web import errors
from legato_client.web.bodies import Bodies
from legato_client.web.connections import Acceptor, ConnectionLimits, GuardedConnection
from legato_client.web.errors import RejectedRequest, response_of
from legato_client.web.listen import Listen

_TOKEN: contextvars.ContextVar[str] = contextvars.ContextVar("legato_caller_token", default="")
_FORM = re.compile(r"[\x21-\x7e]{0,8192}")
_SCHEME = "bearer"


def token() -> str:
    """Return the token of the request that is being answered, or "" if it has none."""
    return _TOKEN.get()


def token_of(headers: Headers) -> str:
    """Return the bearer token or the one of Moondream's header; "" without one.

    One that is malformed or of another scheme must not be ignored.
    """
    scheme, _, found = headers.get("authorization", "").strip().partition(" ")
    if not scheme:
        found = headers.get("x-moondream-auth", "")
    elif scheme.lower() != _SCHEME:
        raise _refusal("the scheme of Authorization is not served: send Bearer TOKEN")
    if _FORM.fullmatch(found.strip()) is None:
        raise _refusal("a token is 1 to 8192 printable ASCII characters without spaces")
    return found.strip()


class TokenCheck:
    """Check that the server accepts the token of the current request.

    A token that was accepted is not asked for again at once: the request's own call is checked in
    any case, so this decides only whether a body is read.
    """

    PERIOD = 10.0  # seconds
    _TIMEOUT = 10.0  # seconds
    _MAX_KNOWN = 1024

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._valid_until: dict[bytes, float] = {}  # by a token's hash, oldest first

    async def __call__(self) -> None:
        key = hashlib.sha256(token().encode()).digest()
        if self._valid_until.get(key, 0.0) > time.monotonic():
            return
        await self._client.server_info(timeout=self._TIMEOUT)
        self._valid_until.pop(key, None)
        if len(self._valid_until) >= self._MAX_KNOWN:
            del self._valid_until[next(iter(self._valid_until))]
        self._valid_until[key] = time.monotonic() + self.PERIOD


def _refusal(message: str) -> RejectedRequest:
    return RejectedRequest(message, status=HTTPStatus.UNAUTHORIZED, code="unauthenticated")


OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json"})
"""Paths open to anyone: they reveal nothing about users and run no model."""

MAX_WEBSOCKET_MESSAGE = 4 * 1024 * 1024 + 64
"""Maximum bytes of the playground's frame with its header."""


class Admission:
    """Middleware that limits the requests in flight, checks hosts, and sets `token()`.

    `OPEN_PATHS` have no limit and need no token; a malformed one counts as none there. On loopback
    a Host that is no name of this host is refused: a page in a browser can reach this host under a
    name of its own, which the browser then takes for the page's.
    """

    def __init__(self, app: ASGIApp, *, listen: Listen, limit: int) -> None:
        self._app = app
        self._listen = listen
        self._limit = limit
        self._num_running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        is_limited = scope["path"] not in OPEN_PATHS
        try:
            _TOKEN.set(self._admit(Headers(scope=scope), is_limited=is_limited))
        except RejectedRequest as refusal:
            await response_of(refusal)(scope, receive, send)
            return
        self._num_running += is_limited
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_running -= is_limited

    def _admit(self, headers: Headers, *, is_limited: bool) -> str:
        """Return the caller's token. Raises RejectedRequest."""
        if self._listen.is_local and not self._listen.is_named(headers.get("host", "")):
            raise RejectedRequest("the Host is not a name of this host", code="wrong_host")
        if is_limited and self._num_running >= self._limit:
            raise RejectedRequest(
                f"{self._limit} requests are being answered, the limit of this process",
                status=HTTPStatus.SERVICE_UNAVAILABLE,
                code="queue_full",
                retry_after=1.0,
            )
        try:
            found = token_of(headers)
            if self._listen.require_token and not found:
                raise _refusal("send a token: Authorization: Bearer TOKEN")
        except RejectedRequest:
            if is_limited:
                raise
            return ""
        return found


class LoopStalls:
    """Measurement of how late a timer of the event loop runs."""

    PERIOD = 0.02  # seconds: short enough to notice a stall of 50 ms
    WINDOW = 30.0  # seconds

    def __init__(self) -> None:
        self._longest = self._longest_before = 0.0  # of this window and the previous one

    @property
    def longest(self) -> float:
        """Seconds of the longest stall of the last half to whole minute, less up to `PERIOD`."""
        return max(self._longest, self._longest_before)

    async def run(self) -> None:
        while True:
            self._longest_before, self._longest = self._longest, 0.0
            until = time.monotonic() + self.WINDOW
            while (now := time.monotonic()) < until:
                await asyncio.sleep(self.PERIOD)
                self._longest = max(self._longest, time.monotonic() - now - self.PERIOD)


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """The Legato server behind the routes: `request.state.backend`.

    `probe` has a connection of its own, on which readiness and tokens are checked beside the work
    of `client`. `timeout` is the longest time in seconds that a call may take. `aliases`: names of
    models that callers may use, with those that the server knows. `background` runs as long as the
    application.
    """

    client: AsyncClient
    probe: AsyncClient
    timeout: float
    aliases: Mapping[str, str]
    bodies: Bodies
    stalls: LoopStalls = dataclasses.field(default_factory=LoopStalls)
    background: list[Callable[[], contextlib.AbstractAsyncContextManager[None]]] = (
        dataclasses.field(default_factory=list)
    )

    @classmethod
    def of(
        cls,
        connect: Callable[[], AsyncClient],
        timeout: float,
        aliases: Mapping[str, str] | None = None,
    ) -> Backend:
        probe = connect()
        return cls(connect(), probe, timeout, aliases or {}, Bodies(TokenCheck(probe)))


def backend_of(request: Request) -> Backend:
    backend = request.state.backend
    assert isinstance(backend, Backend), "the routes are served without their lifespan"
    return backend


def _make_app(
    routes: Sequence[BaseRoute],
    backend: Backend,
    listen: Listen,
    middleware: Sequence[Middleware],
    limit: int,
) -> Starlette:
    """Build the app: the routes and what they share; leaving its lifespan closes the clients."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[dict[str, Backend]]:
        async with backend.client, backend.probe, contextlib.AsyncExitStack() as stack:
            for each in backend.background:
                await stack.enter_async_context(each())
            measuring = asyncio.create_task(backend.stalls.run())
            stack.callback(measuring.cancel)
            yield {"backend": backend}

    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[*middleware, Middleware(Admission, listen=listen, limit=limit)],
        exception_handlers={
            LegatoError: errors.on_legato_error,
            errors.RejectedRequest: errors.on_legato_error,
            errors.ReaderLeft: errors.on_reader_left,
            ClientDisconnect: errors.on_reader_left,
            HTTPException: errors.on_http_exception,
            Exception: errors.on_bug,
        },
    )


_GRACE = 10  # seconds


class HttpServer(uvicorn.Server):
    """HTTP server that runs in this thread; `ready` gets the URL once connections are accepted.

    `middleware` is around everything else. Running requests have `_GRACE` after a signal. A second
    signal does not wait.

    Raises:
        OSError: from the constructor: the address cannot be bound, or TLS cannot be set up.
    """

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        backend: Backend,
        listen: Listen,
        ready: Callable[[str], None],
        middleware: Sequence[Middleware] = (),
        limits: ConnectionLimits | None = None,
    ) -> None:
        self._limits = limits or ConnectionLimits.of_process()
        config = uvicorn.Config(
            _make_app(routes, backend, listen, middleware, self._limits.requests),
            http=GuardedConnection,
            ws_max_size=MAX_WEBSOCKET_MESSAGE,
            ws_per_message_deflate=False,  # a small frame would become a large message
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_GRACE,
            ssl_certfile=listen.tls_cert or None,
            ssl_keyfile=listen.tls_key or None,
        )
        config.load()
        # Its warnings are a line for each malformed request, as many as a caller likes.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        super().__init__(config)
        self._socket = listen.bind()
        self._accepting: asyncio.Task[None] | None = None
        self.url = listen.url(self._socket)
        self._ready = ready

    def serve_forever(self) -> None:
        """Serve until SIGINT or SIGTERM, or until another thread sets `should_exit`."""
        with contextlib.closing(self._socket):
            asyncio.run(self.serve([]))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start without uvicorn's own listeners, which have no limits."""
        await super().startup(sockets)
        acceptor = Acceptor(
            self._socket,
            self._make_connection,
            self.server_state.connections,
            self._limits,
            self.config.ssl,
        )
        self._accepting = asyncio.create_task(acceptor.run())
        self._ready(self.url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        self._socket.close()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop without raising the signal again, unlike uvicorn: a requested stop is no failure."""
        self.force_exit = self.should_exit
        self.should_exit = True

    def _make_connection(self) -> GuardedConnection:
        connection = GuardedConnection(self.config, self.server_state, self.lifespan.state)
        connection.limits = self._limits
        return connection
