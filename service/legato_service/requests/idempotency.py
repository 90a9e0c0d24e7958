"""Calls that named themselves: work that several of them share, and its reply for a while.

They are known by their keys: a tenant's ids are its own.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from legato_engine.core import RequestKey

from legato_service.requests.dispatcher import Caller
from legato_service.requests.registry import duplicate
from legato_service.rpc import call

KEEP = 60.0  # seconds that a reply is given again
MAX_REPLIES = 1024
MAX_BYTES = 16 * 1024 * 1024  # of all replies together, as they travel
_GLANCE = 64 * 1024  # bytes that the event loop hashes itself

Work = Callable[[Caller], Coroutine[Any, Any, bytes]]
"""What is done for a call: its answer, as it travels."""


async def fingerprint(method: str, received: bytes) -> bytes:
    """What a call asks, short: of its method and its bytes as they came, which are not copied."""
    if len(received) <= _GLANCE:
        return _hash(method, received)
    return await asyncio.to_thread(_hash, method, received)


def _hash(method: str, received: bytes) -> bytes:
    digest = hashlib.sha256(method.encode())
    digest.update(b"\0")
    digest.update(received)
    return digest.digest()


@dataclasses.dataclass(slots=True, eq=False)
class _Running:
    fingerprint: bytes
    task: asyncio.Task[bytes]
    waiters: int = 0

    @property
    def abandoned(self) -> bool:
        """Nobody waits any more: it is being cancelled."""
        return self.waiters == 0


class _Kept(NamedTuple):
    fingerprint: bytes
    reply: bytes | None  # None: a stream had this name
    until: float  # time.monotonic() seconds

    @property
    def size(self) -> int:
        """Bytes."""
        return 0 if self.reply is None else len(self.reply)


class _Joint:
    """The caller of shared work: the first one's deadline, and nobody's end but its own."""

    def __init__(self, first: Caller) -> None:
        left = first.time_remaining()
        self._deadline = None if left is None else time.monotonic() + left

    def time_remaining(self) -> float | None:
        """Seconds left, None without a deadline."""
        return None if self._deadline is None else self._deadline - time.monotonic()


class IdempotencyCache:
    """One run for all calls of one name and content, and its reply for `keep` seconds more.

    Whoever joins shares the run's fate: its reply, its failure, the deadline of whoever came first.
    A caller that goes takes nothing with it; with the last one the work is cancelled. Failures are
    given to those who wait and then forgotten, all of them, so that asking again may succeed: those
    that would repeat are cheap to find again. Replies are kept within bounds, the least recently
    used go first.
    """

    def __init__(
        self, *, keep: float = KEEP, max_replies: int = MAX_REPLIES, max_bytes: int = MAX_BYTES
    ) -> None:
        self._keep_for = keep
        self._max_replies = max_replies
        self._max_bytes = max_bytes
        self._running: dict[RequestKey, _Running] = {}
        self._kept: collections.OrderedDict[RequestKey, _Kept] = collections.OrderedDict()
        self._kept_bytes = 0

    def __len__(self) -> int:
        """Replies kept, also those past their time that nobody has looked at since."""
        return len(self._kept)

    @property
    def num_waiting(self) -> int:
        """Callers that wait for runs under way."""
        return sum(running.waiters for running in self._running.values())

    async def once(self, key: RequestKey, asked: bytes, work: Work, caller: Caller) -> bytes:
        """The reply of `work`, of a run under way, or of one that ended a while ago.

        `asked` is the call's `fingerprint`. Raises `DuplicateRequest` when the name is known for
        anything else, and what the work raises.
        """
        while (running := self._running.get(key)) is not None and running.abandoned:
            await asyncio.wait({running.task})
        kept = None if running is not None else self._look_up(key)
        known = running or kept
        if known is not None and known.fingerprint != asked:
            raise duplicate(key)
        if kept is not None:
            assert kept.reply is not None, "a stream has no fingerprint"
            call.current().reply = "kept"
            return kept.reply
        if running is not None:
            rpc = call.current()
            rpc.reply, left = "joined", caller.time_remaining()
            if left is not None:
                rpc.deadline = time.monotonic() + left
        else:
            running = self._start(key, asked, work, caller)
        return await self._wait(running)

    @contextmanager
    def exclusive(self, key: RequestKey) -> Iterator[None]:
        """A stream has the name: nobody joins it, and it joins nobody.

        Raises `DuplicateRequest` when the name is known. It stays taken for `keep` seconds after a
        block that ended well.
        """
        if key in self._running or self._look_up(key) is not None:
            raise duplicate(key)
        yield
        self._keep(key, b"", None)

    def _start(self, key: RequestKey, asked: bytes, work: Work, caller: Caller) -> _Running:
        task = asyncio.create_task(work(_Joint(caller)), name=f"shared {key.name}")
        running = self._running[key] = _Running(asked, task)
        task.add_done_callback(functools.partial(self._on_end, key))
        return running

    async def _wait(self, running: _Running) -> bytes:
        running.waiters += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.waiters -= 1
            if running.abandoned:
                running.task.cancel()  # nothing happens to one that has ended

    def _on_end(self, key: RequestKey, task: asyncio.Task[bytes]) -> None:
        running = self._running.pop(key)
        if not task.cancelled() and task.exception() is None:
            self._keep(key, running.fingerprint, task.result())

    def _look_up(self, key: RequestKey) -> _Kept | None:
        kept = self._kept.get(key)
        if kept is None:
            return None
        if kept.until <= time.monotonic():
            self._drop(key)
            return None
        self._kept.move_to_end(key)
        return kept

    def _keep(self, key: RequestKey, asked: bytes, reply: bytes | None) -> None:
        if key in self._kept:
            self._drop(key)
        self._kept[key] = kept = _Kept(asked, reply, time.monotonic() + self._keep_for)
        self._kept_bytes += kept.size
        while len(self._kept) > self._max_replies or self._kept_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: RequestKey) -> None:
        self._kept_bytes -= self._kept.pop(key).size
