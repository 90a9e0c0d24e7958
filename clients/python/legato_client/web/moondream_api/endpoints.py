"""Moondream's own endpoint: what `moondream.vl(endpoint=...)` calls, beside its chat."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from types import UnionType

import msgspec
from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from legato_client._values.events import Event
from legato_client.web import calls, pictures, streams
from legato_client.web.errors import Refused
from legato_client.web.model_names import options_of
from legato_client.web.moondream_api import answers, bodies
from legato_client.web.operations import Operation, OperationRoute, answered, timeout_of
from legato_client.web.server import backend_of


def routes() -> list[BaseRoute]:
    text, outline = answers.TextEvent, answers.SegmentEvent
    return [
        OperationRoute(
            _operation("caption", bodies.CaptionBody, answers.CaptionAnswer, text), caption
        ),
        OperationRoute(_operation("query", bodies.QueryBody, answers.QueryAnswer, text), query),
        OperationRoute(_operation("detect", bodies.DetectBody, answers.DetectAnswer), detect),
        OperationRoute(_operation("point", bodies.PointBody, answers.PointAnswer), point),
        OperationRoute(
            _operation("segment", bodies.SegmentBody, answers.SegmentAnswer, outline), segment
        ),
    ]


async def caption(request: Request) -> ASGIApp:
    """Describe an image."""
    return await _answer(request, bodies.CaptionBody)


async def query(request: Request) -> ASGIApp:
    """Answer a question, about an image if one is sent."""
    return await _answer(request, bodies.QueryBody)


async def detect(request: Request) -> ASGIApp:
    """Box every instance of an object."""
    return await _answer(request, bodies.DetectBody)


async def point(request: Request) -> ASGIApp:
    """Point at every instance of an object."""
    return await _answer(request, bodies.PointBody)


async def segment(request: Request) -> ASGIApp:
    """Outline an object."""
    return await _answer(request, bodies.SegmentBody)


def _operation(
    skill: str, body: type, answer: type, event: type | UnionType | None = None
) -> Operation:
    return Operation(
        method="POST", path=f"/v1/{skill}", tag="Moondream", body=body, answer=answer, event=event
    )


async def _answer(request: Request, kind: type[bodies.Question]) -> ASGIApp:
    backend = backend_of(request)
    async with backend.bodies.reading(request, kind) as body:
        if body.stream and not body.can_stream:
            raise Refused("this endpoint does not stream", field="stream")
        image = None
        if body.image_url is not None:
            image = await pictures.decoded(body.image_url, "image_url")
            body.image_url = None  # the picture has taken its memory's place
        task, options = body.task(), options_of(request, body.model)
        seconds = timeout_of(request, streaming=body.stream)
        if body.stream:
            events = backend.client.generate(image, task, options=options, timeout=seconds)
            request_id, begun = await streams.begin(request.receive, events)
            return streams.EventStream(_documents(begun), request_id)
        call = calls.ask(backend.client, image, task, options, seconds)
        result = await streams.unless_left(request.receive, call)
    return answered(answers.answer_of(result), result.info.request_id)


async def _documents(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(events):
        async for event in events:
            document = answers.event_of(event)
            if document is not None:
                yield msgspec.json.encode(document)
