"""Who is inside: the requests in flight, and whether more may come in."""

from __future__ import annotations

import asyncio
import collections
import math
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
from legato_engine.core import RequestKey
from legato_engine.errors import AdapterUnusable, Draining, ImageUndecodable

from legato_service.engine import Stream
from legato_service.errors import DuplicateRequest
from legato_service.requests.deadlines import Deadlines

MAX_ENDED = 4096  # ended requests that are remembered


class ActiveRequest(msgspec.Struct, eq=False):
    """A request, for the length of a `with` block; however that ends, the engine forgets it.

    `deadline` is absolute monotonic. In a `gate` it is in flight under its `key`. A picture that
    the engine cannot decode is told by the field it came in, which the engine does not know, and so
    is an adapter that it cannot use.
    """

    deadline: float
    _gate: RequestRegistry | None = None
    _key: RequestKey = RequestKey("")
    _streams: tuple[Stream, ...] = ()
    _deadlines: Deadlines | None = None
    _picture: str = ""
    stopped: bool = False

    def own(self, stream: Stream, deadlines: Deadlines, picture: str = "") -> None:
        """`stream` is part of the request; of a request that was stopped it stops at once.

        Past the deadline it fails with `DeadlineExceeded`, whatever the engine does. `picture` is
        the request's field that brought the bytes of one.
        """
        self._streams += (stream,)
        self._deadlines = deadlines
        self._picture = self._picture or picture
        deadlines.watch(stream, self.deadline)
        if self.stopped:
            stream.stop()

    def stop(self) -> bool:
        """End it now with what it has; whether it was not stopped before."""
        if self.stopped:
            return False
        self.stopped = True
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
        if self._gate is not None:
            self._gate.leave(self._key)
        if isinstance(error, ImageUndecodable) and self._picture:
            error.metadata["field"] = self._picture
        if isinstance(error, AdapterUnusable):
            error.metadata["field"] = "options.adapter"


class Stopped(NamedTuple):
    """What stopping came to."""

    aborted: int
    already_finished: int


class RequestRegistry:
    """Knows who is inside by name, until it is closed for good."""

    def __init__(self) -> None:
        self._inside: dict[RequestKey, ActiveRequest] = {}
        self._ended: collections.deque[RequestKey] = collections.deque(maxlen=MAX_ENDED)
        self._open = True
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._inside)

    def __contains__(self, key: object) -> bool:
        """Whether a request of this key is in flight."""
        return key in self._inside

    @property
    def closed(self) -> bool:
        """Whether new requests are refused."""
        return not self._open

    def check(self, key: RequestKey) -> None:
        """Raises `Draining` or `DuplicateRequest` where nobody of this key could enter."""
        if not self._open:
            raise Draining("the server is shutting down")
        if key in self._inside:
            raise duplicate(key)

    def hold(self, key: RequestKey, deadline: float = math.inf) -> ActiveRequest:
        """Be inside, from now to the end of a block that begins at once. Raises as `check` does."""
        self.check(key)
        return self.enter(key, deadline)

    def enter(self, key: RequestKey, deadline: float) -> ActiveRequest:
        """As `hold`, after a `check` of this turn of the event loop."""
        if not self._inside:
            self._empty.clear()
        visit = self._inside[key] = ActiveRequest(deadline, self, key)
        return visit

    def leave(self, key: RequestKey) -> None:
        """Be inside no longer."""
        del self._inside[key]
        self._ended.append(key)
        if not self._inside:
            self._empty.set()

    def stop(self, target: RequestKey) -> Stopped:
        """Stop the requests that `target` means; also tells how many of them had ended."""
        aborted = sum(each.stop() for key, each in self._inside.items() if key.matches(target))
        return Stopped(aborted, sum(key.matches(target) for key in self._ended))

    def stop_all(self) -> int:
        """Stop all requests; returns how many were not stopped before."""
        return sum(each.stop() for each in self._inside.values())

    def close(self) -> None:
        """Refuse everybody from now on; those inside stay."""
        self._open = False

    async def wait_empty(self) -> None:
        """Until the last one inside has left."""
        await self._empty.wait()


def duplicate(key: RequestKey) -> DuplicateRequest:
    """The refusal of a key that is taken; the caller knows it without its tenant."""
    return DuplicateRequest("a request of this id is known", resource=key.caller_id)
