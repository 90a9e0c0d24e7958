"""Live timeline of the engines as server-sent events, and their pipeline switch."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from legato_client._async_client import AsyncClient
from legato_client._errors import LegatoError
from legato_client._types.server import TimelineSpan, TimelineUpdate
from legato_client.web.server import backend_of
from legato_client.web.streams import continued, frame

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
"""Span names, which events refer to by index. timeline-store.js has the same list."""

_WATCH = 600.0  # seconds; then the page asks again
SILENCE = 15.0
"""Seconds without an update before a comment, which detects a closed page."""

QUIET = b": quiet\n\n"
_MAX_BODY = 1024
_US = 1e6


def routes(operator: Callable[[], str] | None) -> list[BaseRoute]:
    """Return `GET /timeline/events` and, with `operator`, `POST /timeline/depth`.

    `operator` returns the target of AdminService, "" where the other routes ask. The application
    maps a `LegatoError` to its answer.
    """
    timeline = _Timeline(operator)
    depth = [Route("/timeline/depth", timeline.set_depth, methods=["POST"])] if operator else []
    return [Route("/timeline/events", timeline.events), *depth]


class _Depth(msgspec.Struct):
    depth: Literal[1, 2]


class _Timeline:
    def __init__(self, operator: Callable[[], str] | None) -> None:
        self._operator = operator

    async def events(self, request: Request) -> Response:
        """Stream events; a refusal is a plain response, because it comes before the first event."""
        events = self._events(request)
        try:
            first = await anext(events)
        except BaseException:
            await events.aclose()
            raise
        return StreamingResponse(
            continued(first, events),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    async def set_depth(self, request: Request) -> Response:
        bodies = backend_of(request).bodies
        async with (
            bodies.reading(request, _Depth, _MAX_BODY) as body,
            self._client(request) as client,
        ):
            await client.set_pipeline_depth(body.depth)
        return JSONResponse({"depth": body.depth})

    @contextlib.asynccontextmanager
    async def _client(self, request: Request) -> AsyncIterator[AsyncClient]:
        target = self._operator() if self._operator else ""
        if not target:
            yield backend_of(request).client
            return
        async with AsyncClient(target, token="") as client:
            yield client

    async def _events(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Yield events until the server or the page ends; a later failure is the last event."""
        begun, switch = False, self._operator is not None
        async with self._client(request) as client:
            updates = client.watch_timeline(_WATCH)
            async with (
                contextlib.aclosing(updates),
                contextlib.aclosing(_with_silences(updates)) as heard,
            ):
                try:
                    async for update in heard:
                        begun = True
                        if update is None:
                            yield QUIET
                        else:
                            yield frame(msgspec.json.encode(document(update, switch)))
                except LegatoError as error:
                    if not begun:
                        raise
                    failure = {"error": {"message": error.message, "code": error.code}}
                    yield frame(msgspec.json.encode(failure))


async def _with_silences(
    updates: AsyncGenerator[TimelineUpdate, None],
) -> AsyncGenerator[TimelineUpdate | None, None]:
    """Yield updates, and None every `SILENCE` seconds without one."""
    pending: asyncio.Future[TimelineUpdate] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(updates))
            done, _ = await asyncio.wait({pending}, timeout=SILENCE)
            if done:
                update, pending = pending.result(), None
                yield update
            else:
                yield None
    except StopAsyncIteration:
        return
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.wait({pending})


def document(update: TimelineUpdate, switch: bool = True) -> dict[str, Any]:
    """Build the page's JSON; times in microseconds of the server's monotonic clock.

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
        "switch": update.depth_switch and switch,
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
