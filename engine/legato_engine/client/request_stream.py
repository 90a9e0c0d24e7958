"""One request's reports, as its handler reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

import msgspec

from legato_engine.core import (
    Event,
    ObjectEvent,
    OutlineEvent,
    PointEvent,
    ReasoningDelta,
    Request,
    RequestKey,
    TextDelta,
    TokensDelta,
)
from legato_engine.errors import InternalError, LegatoError, from_value
from legato_engine.ipc.messages import Delta, Done, Failed, Queued, Started

StreamReport = Queued | Started | Delta | Done


class RequestStream(msgspec.Struct, eq=False):
    """`Queued`? `Started` `Delta`* `Done`, then the end; a failure is raised once, then the end.

    A consumer that lags gets what piled up as one `Delta`.
    After `stop` it ends with what the request has by then. Cancelling a pending read loses nothing.
    One reader at a time.
    """

    request: Request
    on_abort: Callable[[RequestStream], None]
    on_stop: Callable[[RequestStream], None]
    ended: bool = False
    """Whether nothing more will be added; there may still be reports to read."""
    _pending: list[StreamReport | LegatoError] = []
    _waiter: asyncio.Future[None] | None = None  # of the next report
    _result: asyncio.Future[Done] | None = None

    @property
    def request_id(self) -> RequestKey:
        """The request's key."""
        return self.request.request_id

    def abort(self, error: LegatoError | None = None) -> None:
        """Forget the request: unread reports are dropped, the engine is told. Idempotent.

        A request that had not ended fails with `error`; without one the stream just ends.
        """
        self._pending.clear()
        if not self.ended:
            self._end(error)
            self.on_abort(self)

    def stop(self) -> None:
        """Have the engine end the request now: its `Done` says CANCELLED and holds what there is.

        Harmless after its end and when repeated.
        """
        if not self.ended:
            self.on_stop(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamReport:
        while not self._pending:
            if self.ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        head = self._pending[0]
        if isinstance(head, Delta) and (len(self._pending) > 1 or len(head.events) > 1):
            return self._coalesced(head)
        del self._pending[0]
        if isinstance(head, LegatoError):
            try:
                raise head
            finally:
                del head  # its traceback leads to this frame
        return head

    def done(self) -> asyncio.Future[Done]:
        """The request's `Done`, woken by nothing before it; what came in between is dropped.

        Raises the request's own failure, and `InternalError` when the stream was aborted or read to
        its end. A future and no coroutine, as every call waits here.
        """
        result: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        if self.ended:
            _settle(result, self._pending.pop() if self._pending else None)
            self._pending.clear()
        else:
            self._result = result
        return result

    def feed(self, report: StreamReport | Failed) -> None:
        """For the client: the next report from the engine."""
        if self.ended:
            return
        if isinstance(report, Done):
            self._end(report)
        elif isinstance(report, Failed):
            self._end(from_value(report.error))
        else:
            self._pending.append(report)
            self._wake()

    def fail(self, error: LegatoError) -> None:
        """For the client: end with `error`, after what is still unread."""
        if not self.ended:
            self._end(error)

    def _end(self, last: Done | LegatoError | None) -> None:
        self.ended = True
        result, self._result = self._result, None  # which would hold a failure's frames
        if result is not None and not result.done():  # its reader may have been cancelled
            self._pending.clear()
            _settle(result, last)
        else:
            if last is not None:
                self._pending.append(last)
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _coalesced(self, first: Delta) -> Delta:
        """All deltas that wait, as one."""
        deltas: list[Delta] = []
        for report in self._pending:
            if not isinstance(report, Delta):
                break
            deltas.append(report)
        del self._pending[: len(deltas)]
        events = [event for delta in deltas for event in delta.events]
        return msgspec.structs.replace(first, events=merge_events(events))


def _settle(result: asyncio.Future[Done], last: StreamReport | LegatoError | None) -> None:
    if isinstance(last, Done):
        result.set_result(last)
    elif isinstance(last, LegatoError):
        result.set_exception(last)
    else:
        result.set_exception(InternalError("a stream ended without its result"))


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
