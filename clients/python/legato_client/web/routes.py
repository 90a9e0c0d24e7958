"""Every route of `legato http`."""

from __future__ import annotations

from starlette.routing import BaseRoute

from legato_client.web import about


def routes() -> list[BaseRoute]:
    return [*about.routes()]
