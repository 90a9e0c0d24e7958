"""A process that answers HTTP with the calls of one client."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from types import FrameType
from typing import TypedDict

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.routing import BaseRoute

from legato_client._async_client import AsyncClient
from legato_client._errors import LegatoError
from legato_client.web import errors
from legato_client.web.caller import CallerMiddleware
from legato_client.web.listen import Listen

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json"})
"""What anyone may ask: it tells nothing of the server's users and costs no model."""

_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """The Legato server behind the routes: `request.state.backend`.

    `timeout` is the longest time in seconds that a call may take.
    """

    client: AsyncClient
    timeout: float


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
            HTTPException: errors.on_http_exception,
            Exception: errors.on_bug,
        },
    )


def serve(
    app: Starlette, listen: Listen, ready: Callable[[str], None], *, grace: float = 10.0
) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests finish within `grace` seconds.

    A second signal does not wait. `ready` is told the URL once connections are accepted.

    Raises:
        OSError: the address cannot be bound, or a file of TLS cannot be read.
    """
    with contextlib.closing(listen.bind()) as bound:
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
        server = _Server(config, lambda: ready(listen.url(bound)))
        asyncio.run(server.serve([bound]))


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

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
