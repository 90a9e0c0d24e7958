"""Requests in flight and their deadlines."""

from __future__ import annotations

import asyncio
import collections
import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
from legato_engine.client.request_stream import RequestStream
from legato_engine.errors import (
    AdapterUnusable,
    DeadlineExceeded,
    Draining,
    ImageTooLarge,
    ImageUndecodable,
    LegatoError,
)
from legato_engine.types import RequestKey

from legato_service.errors import RequestIdInUse

RESOLUTION = 0.02  # seconds that a deadline may be late


class Deadlines:
    """Timers that abort streams with `DeadlineExceeded`. Needs a running event loop.

    One timer fires at the earliest deadline, in `time.monotonic()` seconds. Most requests end long
    before theirs, so a timer for each would cost more than the wait for its result.
    """

    def __init__(self) -> None:
        self._deadlines: dict[RequestStream, float] = {}
        self._fires_at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, stream: RequestStream, deadline: float) -> None:
        self._deadlines[stream] = deadline
        if deadline < self._fires_at:
            self._set_timer(deadline)

    def forget(self, stream: RequestStream) -> None:
        """Forget the deadline. Idempotent."""
        self._deadlines.pop(stream, None)

    def _set_timer(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires_at = moment
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, moment - time.monotonic()), self._expire)

    def _expire(self) -> None:
        self._timer, self._fires_at = None, math.inf
        now = time.monotonic()
        for stream in [stream for stream, deadline in self._deadlines.items() if deadline <= now]:
            del self._deadlines[stream]
            stream.abort(DeadlineExceeded("the deadline passed"))
        following = min(self._deadlines.values(), default=math.inf)
        if following < math.inf:
            self._set_timer(max(following, now + RESOLUTION))


# ---------------------------------------------------------------- registry

MAX_ENDED = 4096  # ended requests whose keys are kept


class ActiveRequest(msgspec.Struct, eq=False):
    """A request in flight; its streams are aborted at the end of the `with` block.

    `deadline` is `time.monotonic()` seconds. Errors about the image or the adapter leave the block
    with the request's field, which the engine does not know.
    """

    deadline: float
    _registry: RequestRegistry | None = None
    _key: RequestKey = RequestKey("")
    _streams: tuple[RequestStream, ...] = ()
    _deadlines: Deadlines | None = None
    _image_field: str = ""
    is_stopped: bool = False
    is_generate: bool = False  # a client may resume it
    failure: LegatoError | None = None
    on_fail: Callable[[], None] | None = None
    """Called after `failure` is set, to end work other than streams."""

    def own(self, stream: RequestStream, deadlines: Deadlines, image_field: str = "") -> None:
        """Own the stream, which `deadlines` aborts; `image_field` names the image's bytes."""
        self._streams += (stream,)
        self._deadlines = deadlines
        self._image_field = self._image_field or image_field
        deadlines.watch(stream, self.deadline)
        if self.failure is not None:
            stream.abort(self.failure)
        elif self.is_stopped:
            stream.stop()

    def fail(self, error: LegatoError) -> None:
        """End with `error` now, or as soon as there is a stream."""
        self.failure = error
        for stream in self._streams:
            stream.abort(error)
        if self.on_fail is not None:
            self.on_fail()

    def stop(self) -> bool:
        """End with the partial result; False when it was stopped before."""
        if self.is_stopped:
            return False
        self.is_stopped = True
        for stream in self._streams:
            stream.stop()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._deadlines is not None:
            for stream in self._streams:
                self._deadlines.forget(stream)
                if not stream.ended:
                    stream.abort()
        if self._registry is not None:
            self._registry.leave(self._key, self)
        if isinstance(error, (ImageUndecodable, ImageTooLarge)) and self._image_field:
            error.metadata["field"] = self._image_field
        if isinstance(error, AdapterUnusable):
            error.metadata["field"] = "options.adapter"


class Stopped(NamedTuple):
    """Counts of an operator's stop."""

    aborted: int
    already_finished: int


class RequestRegistry:
    """The requests in flight by key."""

    def __init__(self) -> None:
        self._active: dict[RequestKey, ActiveRequest] = {}
        self._ended: collections.deque[RequestKey] = collections.deque(maxlen=MAX_ENDED)
        self._open = True
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._active)

    def __contains__(self, key: object) -> bool:
        return key in self._active

    @property
    def is_closed(self) -> bool:
        return not self._open

    def check(self, key: RequestKey, *, resumes: bool = False) -> None:
        """Check that a request of this key can be admitted; one that `resumes` may find a Generate.

        Raises:
            Draining: the server is shutting down.
            DuplicateRequest: a request of this key is in flight.
        """
        if not self._open:
            raise Draining("the server is shutting down")
        found = self._active.get(key)
        if found is not None and not (resumes and found.is_generate):
            raise duplicate(key)

    def admit(self, key: RequestKey, deadline: float = math.inf) -> ActiveRequest:
        self.check(key)
        return self.enter(key, deadline)

    def enter(self, key: RequestKey, deadline: float) -> ActiveRequest:
        """Enter a key that was just checked.

        A Generate that has the key ends: its client reads the one that resumes it.
        """
        if not self._active:
            self._empty.clear()
        replaced = self._active.get(key)
        active = self._active[key] = ActiveRequest(deadline, self, key)
        if replaced is not None:
            replaced.fail(RequestIdInUse("the stream was resumed", resource=key.caller_id))
        return active

    def leave(self, key: RequestKey, active: ActiveRequest) -> None:
        if self._active.get(key) is active:  # else another one has taken the key over
            del self._active[key]
        self._ended.append(key)
        if not self._active:
            self._empty.set()

    def stop(self, target: RequestKey) -> Stopped:
        """Stop the requests; those that ended before count too."""
        aborted = sum(each.stop() for key, each in self._active.items() if key.matches(target))
        return Stopped(aborted, sum(key.matches(target) for key in self._ended))

    def stop_all(self) -> int:
        """Return how many were not stopped before."""
        return sum(each.stop() for each in self._active.values())

    def fail_all(self, error: LegatoError) -> None:
        for each in list(self._active.values()):
            each.fail(error)

    def close(self) -> None:
        self._open = False

    async def wait_empty(self) -> None:
        await self._empty.wait()


def duplicate(key: RequestKey) -> RequestIdInUse:
    return RequestIdInUse("a request of this id is known", resource=key.caller_id)
