"""Every route of `legato http`."""

from __future__ import annotations

from starlette.routing import BaseRoute

from legato_client.web import about, openapi
from legato_client.web.moondream_api import endpoints as moondream_api
from legato_client.web.openai_api import endpoints as openai_api


def routes() -> list[BaseRoute]:
    served = [*openai_api.routes(), *moondream_api.routes()]
    return [*served, *about.routes(), openapi.route(served)]
