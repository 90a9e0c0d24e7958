"""Stream of the outputs of one request, for its handler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Self

import msgspec

from legato_engine.errors import InternalError, LegatoError, from_value
from legato_engine.ipc.messages import Done, Failed, OutputDelta, PrefillStarted, QueuePosition
from legato_engine.shm import BlobStore
from legato_engine.types import (
    Certainty,
    Event,
    ImageSource,
    ObjectEvent,
    OutlineEvent,
    PointEvent,
    ReasoningEvent,
    Request,
    RequestKey,
    Resumed,
    TextEvent,
    TokensEvent,
)

StreamOutput = QueuePosition | PrefillStarted | OutputDelta | Done

MAX_LOOSE = 32
"""Unread deltas that are kept as they came; as many more are merged into one."""

Restage = Callable[[BlobStore], Sequence[ImageSource]]
"""Puts the bytes of a request's images into new blobs of an engine's store.

Raises `QueueFull`: memory is full.
"""


class RequestStream(msgspec.Struct, eq=False):
    """Iterator of `QueuePosition`* `PrefillStarted` `OutputDelta`* `Done`; failures raise once.

    Unread deltas are merged, so the result's length bounds the memory. Cancelling a pending read
    loses nothing. One reader at a time.

    A stream outlives its engine: it keeps what another one needs to resume, and its reader only
    waits longer.
    """

    request: Request
    on_abort: Callable[[RequestStream], None]
    on_stop: Callable[[RequestStream], None]
    restage: Restage | None = None  # if None, images' bytes are lost with the engine
    arrival: float = msgspec.field(default_factory=time.monotonic)
    is_sent: bool = False  # to the current engine
    is_stopped: bool = False
    resumptions: int = 0  # lost engines that had the request
    searched: tuple[int, ...] = ()  # numbers of the engines without an image that it names
    ended: bool = False
    """Whether the last output has arrived; outputs may still be unread."""
    _started: PrefillStarted | None = None
    _first_token: float = 0.0  # when the first delta arrived, in monotonic seconds
    _token_ids: list[int] = []
    _payloads: list[tuple[float, float]] = []
    _logprobs: list[float] = []
    _certainties: list[Certainty] = []
    _pending: list[StreamOutput | LegatoError] = []
    _num_loose: int = 0  # of the last pending, deltas that are not merged
    _waiter: asyncio.Future[None] | None = None  # for the next output
    _result: asyncio.Future[Done] | None = None

    def __post_init__(self) -> None:
        """Load a caller's checkpoint as progress that was sent."""
        resumed = self.request.resumed
        if resumed is not None:
            self._first_token = resumed.first_token
            self._token_ids = list(resumed.token_ids)
            self._payloads = list(resumed.payloads)
            self._logprobs = list(resumed.logprobs)
            self._certainties = list(resumed.certainties)

    @property
    def request_id(self) -> RequestKey:
        return self.request.request_id

    def abort(self, error: LegatoError | None = None) -> None:
        """Abort the request in the engine and drop unread outputs. Idempotent.

        Its reader gets `error`, or the end without one. An `error` comes too late for a request
        that has ended: its reader gets the rest.
        """
        if self.ended and error is not None:
            return
        self._pending.clear()
        if not self.ended:
            self._end(error)
            self.on_abort(self)

    def stop(self) -> None:
        """Have the engine end the request now with its partial result. Idempotent."""
        if not self.ended:
            self.is_stopped = True
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
        if isinstance(head, OutputDelta) and (len(self._pending) > 1 or len(head.events) > 1):
            return self._coalesced()
        del self._pending[0]
        self._num_loose = min(self._num_loose, len(self._pending))
        if isinstance(head, LegatoError):
            try:
                raise head
            finally:
                del head  # its traceback references this frame
        return head

    def done(self) -> asyncio.Future[Done]:
        """Return a future of the request's `Done`; earlier outputs are dropped.

        It fails with the request's error, or `InternalError` after the end. A future is cheaper
        than a coroutine, and every call waits here.
        """
        result: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        if self.ended:
            _resolve(result, self._pending.pop() if self._pending else None)
            self._pending.clear()
        else:
            self._result = result
        return result

    def feed(self, output: StreamOutput | Failed) -> None:
        if self.ended:
            return
        if isinstance(output, OutputDelta):
            self._keep(output)
        elif isinstance(output, Done):
            self._end(self._with_first_start(output) if self.resumptions else output)
            return
        elif isinstance(output, Failed):
            self._end(from_value(output.error))
            return
        elif self._started is not None:
            return  # repeated by a second engine
        elif isinstance(output, PrefillStarted):
            self._started = output
        self._pending.append(output)
        self._num_loose = self._num_loose + 1 if isinstance(output, OutputDelta) else 0
        if self._num_loose == 2 * MAX_LOOSE:
            self._merge_loose()
        self._wake()

    def resumed(self, images: Sequence[ImageSource], *, alone: bool = False) -> Request:
        """Return the request for another engine, with its progress so far."""
        known = len(self._certainties) == len(self._token_ids)  # otherwise the caller lost some
        resumed = Resumed(
            arrival=self.arrival,
            first_token=self._first_token,
            token_ids=tuple(self._token_ids),
            payloads=tuple(self._payloads),
            logprobs=tuple(self._logprobs),
            certainties=tuple(self._certainties) if known else (),
            alone=alone,
        )
        return msgspec.structs.replace(self.request.with_images(images), resumed=resumed)

    def fail(self, error: LegatoError) -> None:
        """End with `error`, after unread outputs."""
        if not self.ended:
            self._end(error)

    def _keep(self, delta: OutputDelta) -> None:
        if not self._first_token:
            self._first_token = time.monotonic()
        self._token_ids += delta.token_ids
        self._payloads += delta.payloads
        self._logprobs += delta.logprobs
        self._certainties += delta.certainties

    def _with_first_start(self, done: Done) -> Done:
        """Return `done` with the first engine's values of `PrefillStarted`."""
        image, usage, started = done.image, done.usage, self._started
        if started is not None:
            image = started.image
            usage = msgspec.structs.replace(usage, cached_tokens=started.cached_tokens)
        return msgspec.structs.replace(done, image=image, usage=usage, resumptions=self.resumptions)

    def _end(self, last: Done | LegatoError | None) -> None:
        self.ended = True
        result, self._result = self._result, None  # a failed future would keep frames alive
        if result is not None and not result.done():  # otherwise its reader was cancelled
            self._pending.clear()
            _resolve(result, last)
        else:
            if last is not None:
                self._pending.append(last)
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _coalesced(self) -> OutputDelta:
        deltas: list[OutputDelta] = []
        for output in self._pending:
            if not isinstance(output, OutputDelta):
                break
            deltas.append(output)
        del self._pending[: len(deltas)]
        self._num_loose = 0
        return _merged(deltas)

    def _merge_loose(self) -> None:
        """Merge the older half of the loose deltas."""
        stop = len(self._pending) - MAX_LOOSE
        loose = self._pending[stop - MAX_LOOSE : stop]
        self._pending[stop - MAX_LOOSE : stop] = [
            _merged([output for output in loose if isinstance(output, OutputDelta)])
        ]
        self._num_loose = MAX_LOOSE


def _resolve(result: asyncio.Future[Done], last: StreamOutput | LegatoError | None) -> None:
    if isinstance(last, Done):
        result.set_result(last)
    elif isinstance(last, LegatoError):
        result.set_exception(last)
    else:
        result.set_exception(InternalError("the stream ended without a result"))


def _merged(deltas: list[OutputDelta]) -> OutputDelta:
    return OutputDelta(
        request_id=deltas[0].request_id,
        events=merge_events([event for delta in deltas for event in delta.events]),
        token_ids=tuple([each for delta in deltas for each in delta.token_ids]),
        payloads=tuple([each for delta in deltas for each in delta.payloads]),
        logprobs=tuple([each for delta in deltas for each in delta.logprobs]),
        certainties=tuple([each for delta in deltas for each in delta.certainties]),
    )


def merge_events(events: list[Event]) -> tuple[Event, ...]:
    """Join adjacent pieces of one text or outline."""
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
        case TextEvent(), TextEvent():
            return TextEvent(text=left.text + right.text, tokens=left.tokens + right.tokens)
        case ReasoningEvent(), ReasoningEvent():
            return ReasoningEvent(
                text=left.text + right.text,
                grounding=left.grounding + right.grounding,
                tokens=left.tokens + right.tokens,
            )
        case TokensEvent(), TokensEvent():
            return TokensEvent(tokens=left.tokens + right.tokens)
        case OutlineEvent(), OutlineEvent() if left.index == right.index and right.box is None:
            path = left.path_delta + right.path_delta
            return msgspec.structs.replace(left, path_delta=path)
    return None
