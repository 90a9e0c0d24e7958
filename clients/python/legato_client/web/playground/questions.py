"""Handlers of what is asked about a picture."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from legato_client._async_client import AsyncClient
from legato_client._errors import LegatoError
from legato_client._images.sources import CachedImage
from legato_client._values.server import model_document
from legato_client._values.tasks import Options, Task
from legato_client.web.errors import Refused, status_of
from legato_client.web.playground import answers, bodies, tasks
from legato_client.web.playground.snippets import code
from legato_client.web.playground.snippets.connection import Connection
from legato_client.web.server import backend_of

PICTURE_TTL = 600.0
"""Seconds that the server is asked to hold a picture; the page sends it again when it is gone."""

Handler = Callable[[Request], Awaitable[Response]]


def told(handler: Handler) -> Handler:
    """A handler whose failures the page is told as it is told those of a stream."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except LegatoError as error:
            return JSONResponse(answers.failure(error), status_of(error))
        except Refused as refusal:
            failure = answers.failure(LegatoError(refusal.message, code=refusal.code.upper()))
            return JSONResponse(failure, refusal.status)

    return handle


async def describe(request: Request, connection: Connection) -> Response:
    """What the server is, serves and allows, and where it is."""
    client = backend_of(request).client
    info, models = await client.server_info(), await client.models()
    return JSONResponse(
        {
            "server": {"name": info.name, "version": info.version, "target": connection.target},
            "limits": dataclasses.asdict(info.limits),
            "models": [model_document(model) for model in models],
            "max_picture_bytes": bodies.MAX_PICTURE_BYTES,
        }
    )


async def upload(request: Request) -> Response:
    """Hand a picture to the server, which decodes it; the answer names it in later requests."""
    client = backend_of(request).client
    async with backend_of(request).bodies.holding(request, bodies.MAX_PICTURE_BYTES) as data:
        held = await client.put_image(bytes(data), ttl=PICTURE_TTL)
    return JSONResponse({"image_id": held.image_id, "width": held.width, "height": held.height})


async def generate(request: Request) -> Response:
    """Stream the events of one task as JSON lines; leaving cancels the work on the server."""
    client = backend_of(request).client
    image_id, task, options = _question(await bodies.read_object(request), "image_id")
    image = None if image_id is None else CachedImage(image_id)
    lines = _lines(client, image, task, options)
    return StreamingResponse(lines, media_type="application/x-ndjson")


async def snippets(request: Request, connection: Connection) -> Response:
    """The programs that make a request."""
    picture, task, options = _question(await bodies.read_object(request), "picture")
    made = code(connection, picture, task, options)
    return JSONResponse(dataclasses.asdict(made))


def _question(body: dict[str, object], image_key: str) -> tuple[str | None, Task, Options]:
    image = bodies.text_of(body, image_key)
    options = tasks.read_options(body.get("options", {}))
    return image, tasks.read_task(body.get("task")), options


async def _lines(
    client: AsyncClient, image: CachedImage | None, task: Task, options: Options
) -> AsyncIterator[str]:
    try:
        async with contextlib.aclosing(client.generate(image, task, options=options)) as events:
            async for event in events:
                yield _line(answers.event(event))
    except LegatoError as error:
        yield _line(answers.failure(error))


def _line(value: answers.Json) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"
