"""A process that answers HTTP with the calls of one client."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import FrameType
from typing import TypedDict

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.routing import BaseRoute

from legato_client._async_client import AsyncClient
from legato_client._errors import LegatoError
from legato_client.web import errors
from legato_client.web.bodies import Bodies
from legato_client.web.caller import CallerMiddleware
from legato_client.web.listen import Listen

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json"})
"""What anyone may ask: it tells nothing of the server's users and costs no model."""

_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """The Legato server behind the routes: `request.state.backend`.

    `timeout` is the longest time in seconds that a call may take. `aliases`: names of models that
    callers may use, with those that the server knows.
    """

    client: AsyncClient
    timeout: float
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    bodies: Bodies = dataclasses.field(default_factory=Bodies)


class State(TypedDict):
    """What the lifespan gives each request."""

    backend: Backend


def backend_of(request: Request) -> Backend:
    backend = request.state.backend
    assert isinstance(backend, Backend), "the routes are served without their lifespan"
    return backend


def make_app(
    routes: Sequence[BaseRoute],
    backend: Backend,
    listen: Listen,
    middleware: Sequence[Middleware] = (),
) -> Starlette:
    """The routes with what all of them share; leaving its lifespan closes the client.

    `middleware` is around everything else.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[State]:
        async with backend.client:
            yield {"backend": backend}

    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[
            *middleware,
            *_host_checks(listen),
            Middleware(CallerMiddleware, required=listen.require_token, free=OPEN_PATHS),
        ],
        exception_handlers={
            LegatoError: errors.on_legato_error,
            errors.Refused: errors.on_legato_error,
            errors.ReaderLeft: errors.on_reader_left,
            ClientDisconnect: errors.on_reader_left,
            HTTPException: errors.on_http_exception,
            Exception: errors.on_bug,
        },
    )


class HttpServer(uvicorn.Server):
    """Serves `app` in this thread; `ready` is told the URL once connections are accepted.

    `grace`: seconds that running requests have after a signal. A second signal does not wait.

    Raises:
        OSError: from the constructor: the address cannot be bound, or TLS cannot be set up.
    """

    def __init__(
        self, app: Starlette, listen: Listen, ready: Callable[[str], None], *, grace: float = 10.0
    ) -> None:
        config = uvicorn.Config(
            app,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=round(grace),
            ssl_certfile=listen.tls_cert or None,
            ssl_keyfile=listen.tls_key or None,
        )
        config.load()
        super().__init__(config)
        self._socket = listen.bind()
        self.url = listen.url(self._socket)
        self._ready = ready

    def serve_forever(self) -> None:
        """Serve until SIGINT or SIGTERM, or until `stop`, which another thread may call."""
        with contextlib.closing(self._socket):
            asyncio.run(self.serve([self._socket]))

    def stop(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready(self.url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Unlike uvicorn's, not raised once more at the end: to be told to stop is no failure."""
        self.force_exit = self.should_exit
        self.should_exit = True


def _host_checks(listen: Listen) -> list[Middleware]:
    """A page in a browser can reach this host under a name of its own: such names are refused."""
    if not listen.is_local:
        return []
    hosts = {*_LOCAL_HOSTS, listen.address.rpartition(":")[0].lower()}
    return [Middleware(TrustedHostMiddleware, allowed_hosts=sorted(hosts), www_redirect=False)]
