"""One request's reports, as its handler reads them."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Callable

import msgspec

from legato_engine.core import (
    Event,
    ObjectEvent,
    OutlineEvent,
    PointEvent,
    ReasoningDelta,
    Request,
    TextDelta,
    TokensDelta,
)
from legato_engine.errors import InternalError, LegatoError, from_value
from legato_engine.messages import Delta, Done, Failed, Queued, Started

StreamReport = Queued | Started | Delta | Done


class RequestStream(AsyncIterator[StreamReport]):
    """`Queued`? `Started` `Delta`* `Done`, then the end; a failure is raised once, then the end.

    A consumer that lags gets what piled up as one `Delta`.
    After `stop` it ends with what the request has by then. Cancelling a pending read loses nothing.
    One reader at a time.
    """

    __slots__ = (
        "_ended",
        "_on_abort",
        "_on_stop",
        "_pending",
        "_waiter",
        "_waits_for_end",
        "request",
    )

    def __init__(
        self,
        request: Request,
        *,
        on_abort: Callable[[RequestStream], None],
        on_stop: Callable[[RequestStream], None],
    ) -> None:
        self.request = request
        self._on_abort = on_abort
        self._on_stop = on_stop
        self._pending: collections.deque[StreamReport | LegatoError] = collections.deque()
        self._ended = False
        self._waits_for_end = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def ended(self) -> bool:
        """Whether nothing more will be added; there may still be reports to read."""
        return self._ended

    def abort(self, error: LegatoError | None = None) -> None:
        """Forget the request: unread reports are dropped, the engine is told. Idempotent.

        A request that had not ended fails with `error`; without one the stream just ends.
        """
        self._pending.clear()
        if not self._ended:
            if error is not None:
                self._pending.append(error)
            self._end()
            self._on_abort(self)

    def stop(self) -> None:
        """Have the engine end the request now: its `Done` says CANCELLED and holds what there is.

        Harmless after its end and when repeated.
        """
        if not self._ended:
            self._on_stop(self)

    async def __anext__(self) -> StreamReport:
        while not self._pending:
            if self._ended:
                raise StopAsyncIteration
            await self._news()
        head = self._pending.popleft()
        if isinstance(head, LegatoError):
            raise head
        if isinstance(head, Delta) and (self._pending or len(head.events) > 1):
            return self._coalesce(head)
        return head

    async def done(self) -> Done:
        """The request's `Done`, woken by nothing before it; what came in between is dropped.

        Raises the request's own failure, and `InternalError` when the stream was aborted or read to
        its end.
        """
        self._waits_for_end = True
        try:
            while not self._ended:
                await self._news()
        finally:
            self._waits_for_end = False
        last = self._pending.pop() if self._pending else None
        self._pending.clear()
        if isinstance(last, LegatoError):
            raise last
        if not isinstance(last, Done):
            raise InternalError("a stream ended without its result")
        return last

    def feed(self, report: StreamReport | Failed) -> None:
        """For the client: the next report from the engine."""
        if self._ended:
            return
        if isinstance(report, Failed):
            self.fail(from_value(report.error))
            return
        self._pending.append(report)
        if isinstance(report, Done):
            self._end()
        elif not self._waits_for_end:
            self._wake()

    def fail(self, error: LegatoError) -> None:
        """For the client: end with `error`, after what is still unread."""
        if not self._ended:
            self._pending.append(error)
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._wake()

    def _news(self) -> asyncio.Future[None]:
        """What `_wake` ends: a future and no coroutine, as every call waits here."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _coalesce(self, first: Delta) -> Delta:
        events = list(first.events)
        while self._pending and isinstance(following := self._pending[0], Delta):
            self._pending.popleft()
            events.extend(following.events)
        return msgspec.structs.replace(first, events=merge_events(events))


def merge_events(events: list[Event]) -> tuple[Event, ...]:
    """The same events with neighbouring pieces of one text or outline joined."""
    merged: list[Event] = []
    for event in events:
        joined = _join(merged[-1], event) if merged else None
        if joined is None:
            merged.append(event)
        else:
            merged[-1] = joined
    return tuple(merged)


def _join(left: Event, right: Event) -> Event | None:
    if type(left) is not type(right) or isinstance(left, (PointEvent, ObjectEvent)):
        return None
    match left, right:
        case TextDelta(), TextDelta():
            return TextDelta(text=left.text + right.text, tokens=left.tokens + right.tokens)
        case ReasoningDelta(), ReasoningDelta():
            return ReasoningDelta(
                text=left.text + right.text,
                grounding=left.grounding + right.grounding,
                tokens=left.tokens + right.tokens,
            )
        case TokensDelta(), TokensDelta():
            return TokensDelta(tokens=left.tokens + right.tokens)
        case OutlineEvent(), OutlineEvent() if left.index == right.index and right.box is None:
            path = left.path_delta + right.path_delta
            return msgspec.structs.replace(left, path_delta=path)
    return None
