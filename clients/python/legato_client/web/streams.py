"""Answers that end when their reader leaves, and server-sent events."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from legato_client._errors import LegatoError
from legato_client._types.results import Event, Queued, Started, Token
from legato_client.web.errors import ReaderLeft, document_of

ValueT = TypeVar("ValueT")


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, ValueT]) -> ValueT:
    """Return the result of `work`; cancel it and raise ReaderLeft when the client leaves.

    The body must have been read before.
    """
    task = asyncio.create_task(work)
    left = asyncio.create_task(_wait_until_left(receive))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ReaderLeft
        return task.result()
    finally:
        task.cancel()
        left.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def begin(
    receive: Receive, events: AsyncGenerator[Event, None]
) -> tuple[str, AsyncGenerator[Event, None]]:
    """Return the request's id, and its events from the first after the queue on.

    Returns when that one is there, so that a refusal still has an HTTP status.
    """
    try:
        first = await cancel_on_disconnect(receive, _first(events))
    except BaseException:
        await events.aclose()
        raise
    request_id = first.request_id if isinstance(first, Started) else ""
    return request_id, continued(first, events)


def frame(document: bytes, event: str = "") -> bytes:
    """Return a server-sent event; most APIs name none."""
    named = b"event: " + event.encode() + b"\n" if event else b""
    return named + b"data: " + document + b"\n\n"


class WireForm(abc.ABC):
    """Answer and stream events of one request in the form of an API."""

    @abc.abstractmethod
    def answer(self, result: Any, tokens: Iterable[Token] | None) -> Struct:
        """Build the answer; `tokens` are the answer's, None if they were not requested."""

    @abc.abstractmethod
    def frames(self, event: Event) -> Iterator[bytes]:
        """Return the server-sent events of an event."""

    def failure(self, error: LegatoError) -> bytes:
        """Return the server-sent event of a failure in a stream that has begun."""
        return frame(msgspec.json.encode(document_of(error)))


@dataclasses.dataclass(frozen=True, slots=True)
class ServerSentEvents:
    """Events of the server in the `form` of an API.

    A failure is the last event and cuts the connection: a client that looks for answers only does
    not take the part for the whole.
    """

    events: AsyncGenerator[Event, None]
    form: WireForm
    request_id: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self.events):
            with contextlib.suppress(ReaderLeft):
                await cancel_on_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # nginx would collect the events
            *([(b"x-request-id", self.request_id.encode())] if self.request_id else []),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for event in self.events:
                for each in self.form.frames(event):
                    await send({"type": "http.response.body", "body": each, "more_body": True})
        except LegatoError as error:
            last = self.form.failure(error)
            await send({"type": "http.response.body", "body": last, "more_body": True})
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _first(events: AsyncIterator[Event]) -> Event:
    async for event in events:
        if not isinstance(event, Queued):
            return event
    raise AssertionError("a stream ends with Finished or raises")


async def continued(
    first: ValueT, events: AsyncGenerator[ValueT, None]
) -> AsyncGenerator[ValueT, None]:
    """Yield the first, which was taken already, and the others."""
    async with contextlib.aclosing(events):
        yield first
        async for event in events:
            yield event


async def _wait_until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
