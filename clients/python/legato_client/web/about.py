"""What the process says of itself."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from legato_client._errors import DeadlineExceeded, LegatoError, Unavailable
from legato_client.web.errors import response_of
from legato_client.web.server import backend_of

_READY_TIMEOUT = 5.0  # seconds


def routes() -> list[BaseRoute]:
    return [Route("/healthz", healthz), Route("/readyz", readyz)]


async def healthz(_request: Request) -> JSONResponse:
    """This process answers, whatever the Legato server does."""
    return JSONResponse({"status": "ok"})


async def readyz(request: Request) -> Response:
    """The Legato server answers; that it refuses this caller is an answer, too."""
    try:
        await backend_of(request).probe.server_info(timeout=_READY_TIMEOUT)
    except (Unavailable, DeadlineExceeded) as error:
        return response_of(error)
    except LegatoError:
        pass
    return JSONResponse({"status": "ok"})
