"""The OpenAPI document and the routes of `legato http`."""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from legato_client._errors import DeadlineExceeded, LegatoError, Unavailable
from legato_client._version import version
from legato_client.web import moondream_api, openai_api, responses_api
from legato_client.web.errors import ErrorDocument, response_of
from legato_client.web.operations import TIMEOUT, OperationRoute
from legato_client.web.server import backend_of

Kind = type | UnionType

_REFERENCES = "#/components/schemas/{name}"
_JSON = "application/json"
_EVENTS = "text/event-stream"
_TEXT = {"type": "string"}
_HEADERS = {
    "X-Request-Id": "names the request in logs; the answer has it, too",
    TIMEOUT.title(): "seconds that the caller waits",
}


def route(served: Sequence[OperationRoute]) -> Route:
    """Return the route `/openapi.json`, which describes these routes."""
    document = msgspec.json.encode(make_document(served))

    async def answer(_request: Request) -> Response:
        return Response(document, media_type=_JSON)

    return Route("/openapi.json", answer)


def make_document(served: Sequence[OperationRoute]) -> dict[str, Any]:
    kinds: dict[Kind, None] = {
        kind: None for each in served for kind in (each.body, each.answer, each.event) if kind
    }  # in order, once
    kinds[ErrorDocument] = None
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCES)
    by_kind = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for each in served:
        paths.setdefault(each.path_format, {})[each.method.lower()] = _entry(each, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Legato over HTTP", "version": version()},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "moondream": {"type": "apiKey", "in": "header", "name": "X-Moondream-Auth"},
            },
        },
        "security": [{}, {"bearer": []}, {"moondream": []}],
    }


def _entry(route: OperationRoute, schemas: dict[Kind, dict[str, Any]]) -> dict[str, Any]:
    answer = {_JSON: {"schema": schemas[route.answer]}}
    if route.event is not None:
        answer[_EVENTS] = {"schema": schemas[route.event]}
    entry: dict[str, Any] = {
        "tags": [route.tag],
        "summary": route.summary,
        "operationId": route.name,
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": _TEXT}
                for name in route.param_convertors
            ),
            *(
                {"name": name, "in": "header", "description": text, "schema": _TEXT}
                for name, text in _HEADERS.items()
            ),
        ],
        "responses": {
            "200": {"description": "The answer", "content": answer},
            "default": {
                "description": "A failure",
                "content": {_JSON: {"schema": schemas[ErrorDocument]}},
            },
        },
    }
    if route.body is not None:
        content = {_JSON: {"schema": schemas[route.body]}}
        entry["requestBody"] = {"required": True, "content": content}
    return entry


_READY_TIMEOUT = 5.0  # seconds


def about_routes() -> list[BaseRoute]:
    return [Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)]


async def healthz(_request: Request) -> JSONResponse:
    """Answer as long as this process runs, whatever the Legato server does."""
    return JSONResponse({"status": "ok"})


async def readyz(request: Request) -> Response:
    """Answer whether the Legato server is reachable, even if it refuses this caller."""
    try:
        await backend_of(request).probe.server_info(timeout=_READY_TIMEOUT)
    except (Unavailable, DeadlineExceeded) as error:
        return response_of(error)
    except LegatoError:
        pass
    return JSONResponse({"status": "ok"})


_METRICS = """\
# HELP legato_http_event_loop_longest_stall_seconds Longest stall in about the last minute.
# TYPE legato_http_event_loop_longest_stall_seconds gauge
legato_http_event_loop_longest_stall_seconds {stall:.6f}
# HELP legato_http_body_memory_bytes Memory of bodies that are read or answered.
# TYPE legato_http_body_memory_bytes gauge
legato_http_body_memory_bytes {held}
"""


async def metrics(request: Request) -> Response:
    """Answer for Prometheus how this process does."""
    backend = backend_of(request)
    text = _METRICS.format(stall=backend.stalls.longest, held=backend.bodies.held)
    return Response(text, media_type="text/plain; version=0.0.4")


def routes() -> list[BaseRoute]:
    served = [*openai_api.routes(), *responses_api.routes(), *moondream_api.routes()]
    return [*served, *about_routes(), route(served)]
