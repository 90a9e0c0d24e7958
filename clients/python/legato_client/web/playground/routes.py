"""What the playground answers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles

from legato_client.web import routes as http
from legato_client.web import timeline
from legato_client.web.playground import live, questions
from legato_client.web.playground.snippets.connection import Connection

STATIC = Path(__file__).parents[1] / "static"


def routes(connection: Connection, operator: Callable[[], str] | None = None) -> list[BaseRoute]:
    """The page, its files, what it asks for, and all of `legato http`; to be served with `Guard`.

    `connection` is how the programs that the page shows reach the server. `operator` returns the
    target of AdminService, "" where it is the server's own; None keeps the page from changing the
    pipeline's depth.
    """
    describe = functools.partial(questions.describe, connection=connection)
    snippets = functools.partial(questions.snippets, connection=connection)
    own = [
        Route("/", _page),
        Mount("/static", StaticFiles(directory=STATIC)),
        Route("/playground/server", questions.told(describe)),
        Route("/playground/pictures", questions.told(questions.upload), methods=["POST"]),
        Route("/playground/generate", questions.told(questions.generate), methods=["POST"]),
        Route("/playground/code", questions.told(snippets), methods=["POST"]),
        WebSocketRoute("/playground/session", live.Sessions().serve),
    ]
    return [*own, *timeline.routes(operator, switch=operator is not None), *http.routes()]


async def _page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html")
