"""The outputs of one request, as its handler reads them."""

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

StreamOutput = Queued | Started | Delta | Done


class RequestStream(msgspec.Struct, eq=False):
    """Yields `Queued`? `Started` `Delta`* `Done`; a failure is raised once instead.

    Unread deltas are merged into one. Cancelling a pending read loses nothing. One reader at a
    time.
    """

    request: Request
    on_abort: Callable[[RequestStream], None]
    on_stop: Callable[[RequestStream], None]
    ended: bool = False
    """Whether the last output has arrived; outputs may still be unread."""
    _pending: list[StreamOutput | LegatoError] = []
    _waiter: asyncio.Future[None] | None = None  # for the next output
    _result: asyncio.Future[Done] | None = None

    @property
    def request_id(self) -> RequestKey:
        """The key of the request."""
        return self.request.request_id

    def abort(self, error: LegatoError | None = None) -> None:
        """Abort the request in the engine and drop unread outputs. Idempotent.

        If the request had not ended, its reader gets `error`, or the end without one.
        """
        self._pending.clear()
        if not self.ended:
            self._end(error)
            self.on_abort(self)

    def stop(self) -> None:
        """Have the engine end the request now: `Done` says CANCELLED, with the partial result.

        Idempotent, and without effect after the end.
        """
        if not self.ended:
            self.on_stop(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamOutput:
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
                del head  # its traceback references this frame
        return head

    def done(self) -> asyncio.Future[Done]:
        """Return a future of the request's `Done`; earlier outputs are dropped.

        It fails with the request's error, or with `InternalError` when the stream was aborted or
        read to its end. Not a coroutine, because every call waits here and a future is cheaper.
        """
        result: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        if self.ended:
            _resolve(result, self._pending.pop() if self._pending else None)
            self._pending.clear()
        else:
            self._result = result
        return result

    def feed(self, output: StreamOutput | Failed) -> None:
        """Add the next output from the engine; used by the connection."""
        if self.ended:
            return
        if isinstance(output, Done):
            self._end(output)
        elif isinstance(output, Failed):
            self._end(from_value(output.error))
        else:
            self._pending.append(output)
            self._wake()

    def fail(self, error: LegatoError) -> None:
        """End with `error`, after unread outputs; used by the connection."""
        if not self.ended:
            self._end(error)

    def _end(self, last: Done | LegatoError | None) -> None:
        self.ended = True
        result, self._result = self._result, None  # a failed future would keep its frames
        if result is not None and not result.done():  # else its reader was cancelled
            self._pending.clear()
            _resolve(result, last)
        else:
            if last is not None:
                self._pending.append(last)
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _coalesced(self, first: Delta) -> Delta:
        deltas: list[Delta] = []
        for output in self._pending:
            if not isinstance(output, Delta):
                break
            deltas.append(output)
        del self._pending[: len(deltas)]
        events = [event for delta in deltas for event in delta.events]
        return msgspec.structs.replace(first, events=merge_events(events))


def _resolve(result: asyncio.Future[Done], last: StreamOutput | LegatoError | None) -> None:
    if isinstance(last, Done):
        result.set_result(last)
    elif isinstance(last, LegatoError):
        result.set_exception(last)
    else:
        result.set_exception(InternalError("the stream ended without a result"))


def merge_events(events: list[Event]) -> tuple[Event, ...]:
    """Join neighbouring pieces of one text or outline."""
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
