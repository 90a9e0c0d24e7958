"""Requests in flight and their deadlines."""

from __future__ import annotations

import asyncio
import collections
import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

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

MAX_ENDED = 4096  # ended requests whose keys are kept


class ActiveRequest(msgspec.Struct, eq=False):
    """A request in flight; its streams are aborted at its deadline and at the end of the block.

    `deadline` is `time.monotonic()` seconds. Needs a running event loop. Errors about the image or
    the adapter leave the block with the request's field, which the engine does not know.
    """

    deadline: float
    _registry: RequestRegistry | None = None
    _key: RequestKey = RequestKey("")
    _streams: tuple[RequestStream, ...] = ()
    _timer: asyncio.TimerHandle | None = None  # of the deadline, once there is a stream
    _image_field: str = ""
    is_stopped: bool = False
    is_generate: bool = False  # a client may resume it
    failure: LegatoError | None = None
    on_fail: Callable[[], None] | None = None
    """Called after `failure` is set, to end work other than streams."""

    def own(self, stream: RequestStream, image_field: str = "") -> None:
        """Own the stream; `image_field` names the image's bytes."""
        self._streams += (stream,)
        self._image_field = self._image_field or image_field
        if self._timer is None:
            left = max(0.0, self.deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(left, self._expire)
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

    def _expire(self) -> None:
        self.fail(DeadlineExceeded("the deadline passed"))

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
        if self._timer is not None:
            self._timer.cancel()
        for stream in self._streams:
            if not stream.ended:
                stream.abort()
        if self._registry is not None:
            self._registry.leave(self._key, self)
        if isinstance(error, (ImageUndecodable, ImageTooLarge)) and self._image_field:
            error.metadata["field"] = self._image_field
        if isinstance(error, AdapterUnusable):
            error.metadata["field"] = "options.adapter"


class RequestRegistry:
    """The requests in flight by key."""

    def __init__(self) -> None:
        self._active: dict[RequestKey, ActiveRequest] = {}
        self._ended: collections.deque[RequestKey] = collections.deque(maxlen=MAX_ENDED)
        self.is_closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._active)

    def __contains__(self, key: object) -> bool:
        return key in self._active

    def check(self, key: RequestKey, *, resumes: bool = False) -> None:
        """Check that a request of this key can be admitted; one that `resumes` may find a Generate.

        Raises:
            Draining: the server is shutting down.
            RequestIdInUse: a request of this key is in flight.
        """
        if self.is_closed:
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

    def stop(self, target: RequestKey) -> tuple[int, int]:
        """Stop the requests; return how many, and how many had ended before."""
        aborted = sum(each.stop() for key, each in self._active.items() if key.matches(target))
        return aborted, sum(key.matches(target) for key in self._ended)

    def stop_all(self) -> int:
        """Return how many were not stopped before."""
        return sum(each.stop() for each in self._active.values())

    def fail_all(self, error: LegatoError) -> None:
        for each in list(self._active.values()):
            each.fail(error)

    def close(self) -> None:
        self.is_closed = True

    async def wait_empty(self) -> None:
        await self._empty.wait()


def duplicate(key: RequestKey) -> RequestIdInUse:
    return RequestIdInUse("a request of this id is known", resource=key.caller_id)
