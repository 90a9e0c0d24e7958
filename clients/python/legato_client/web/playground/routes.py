"""What the playground answers."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles

from legato_client.web.playground import live, questions

STATIC = Path(str(resources.files("legato_client.web") / "static"))


def routes() -> list[BaseRoute]:
    """The page, its files, and what it asks for.

    The application's state holds the `client` and the `connection` that snippets name.
    """
    return [
        Route("/", _page),
        Route("/playground/server", questions.describe),
        Route("/playground/pictures", questions.upload, methods=["POST"]),
        Route("/playground/generate", questions.generate, methods=["POST"]),
        Route("/playground/code", questions.snippets, methods=["POST"]),
        WebSocketRoute("/playground/session", live.session),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]


async def _page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html")
