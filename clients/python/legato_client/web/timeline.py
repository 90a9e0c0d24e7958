"""The live timeline of the engines as server-sent events, and the switch of the pipeline's depth."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from legato_client._async_client import AsyncClient
from legato_client._errors import InvalidArgument, LegatoError
from legato_client._values.admin import TimelineSpan, TimelineUpdate

ClientOf = Callable[[Request], AsyncClient]
"""Returns the client whose server has AdminService: often the operator's socket."""

NAMES = (
    "plan",
    "launch",
    "finalize",
    "wait",
    "commit",
    "forward",
    "sample",
    "copy",
    "idle",
    "held",
)
"""The names of spans, which events give as indices. timeline-store.js has the same list."""

_WATCH = 600.0  # seconds; then the page asks again
_QUIET = 15.0  # seconds without an event before a comment, by which a page that left is noticed
_MAX_BODY = 1024
_US = 1e6


def routes(client_of: ClientOf) -> list[BaseRoute]:
    """`GET /timeline/events` and `POST /timeline/depth`; the application maps a `LegatoError`."""
    return [
        Route("/timeline/events", functools.partial(_events, client_of)),
        Route("/timeline/depth", functools.partial(_set_depth, client_of), methods=["POST"]),
    ]


async def _events(client_of: ClientOf, request: Request) -> Response:
    """A refusal is an answer of its own, because it comes before the first event."""
    updates = client_of(request).watch_timeline(_WATCH)
    try:
        first = await anext(updates)
    except BaseException:
        await updates.aclose()
        raise
    return StreamingResponse(
        _stream(first, updates),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _set_depth(client_of: ClientOf, request: Request) -> Response:
    """The body is `{"depth": 1}`. Its type is asked for, so that no other page's form can send it."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise InvalidArgument("the body must be application/json")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY:
            raise InvalidArgument("the body is too long")
    try:
        depth = json.loads(body)["depth"]
    except (ValueError, TypeError, KeyError):
        raise InvalidArgument("the body must be a JSON object with `depth`") from None
    if depth not in (1, 2) or isinstance(depth, bool | float):
        raise InvalidArgument("depth must be 1 or 2")
    await client_of(request).set_pipeline_depth(depth)
    return JSONResponse({"depth": depth})


async def _stream(
    first: TimelineUpdate, updates: AsyncGenerator[TimelineUpdate, None]
) -> AsyncGenerator[bytes, None]:
    """The updates until the server or the page ends them; a failure is the last event."""
    pending: asyncio.Task[TimelineUpdate] | None = None
    try:
        yield _event(document(first))
        while True:
            pending = pending or asyncio.ensure_future(_next(updates))
            done, _ = await asyncio.wait({pending}, timeout=_QUIET)
            if done:
                update, pending = pending.result(), None
                yield _event(document(update))
            else:
                yield b": quiet\n\n"
    except StopAsyncIteration:
        return
    except LegatoError as error:
        yield _event({"error": {"message": error.message, "code": error.code}})
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.wait({pending})
        await updates.aclose()


async def _next(updates: AsyncGenerator[TimelineUpdate, None]) -> TimelineUpdate:
    return await anext(updates)


def document(update: TimelineUpdate) -> dict[str, Any]:
    """What the page is told, as JSON; times in microseconds of the server's monotonic clock.

    A launch is `[number, kind, slot, rows, riding, zombies, tokens, start, spans]`, with slot -1
    where it had none; its spans are triples in a row: index in `NAMES`, start after the launch's,
    and length.
    """
    steps = update.decode_steps
    return {
        "engine": update.engine,
        "started": round(update.engine_started * _US),
        "lost": update.lost_launches,
        "depth": update.pipeline_depth,
        "switch": update.depth_switch,
        "steps": None if steps is None else dataclasses.asdict(steps),
        "launches": list(_launches(update.spans)),
    }


def _launches(spans: tuple[TimelineSpan, ...]) -> Iterator[list[Any]]:
    for _, group in itertools.groupby(spans, key=lambda span: span.launch):
        own = list(group)
        first, start = own[0], min(span.start for span in own)
        slot, flat = -1, list[float]()
        for span in own:
            if span.lane.startswith("slot "):
                slot = int(span.lane.removeprefix("slot "))
            if span.name in NAMES:  # a newer server may have more
                offset, length = (span.start - start) * _US, span.duration * _US
                flat += (NAMES.index(span.name), round(offset, 1), round(length, 1))
        counts = (first.rows, first.riding, first.zombies, first.tokens)
        yield [first.launch, first.kind, slot, *counts, round(start * _US, 1), flat]


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
