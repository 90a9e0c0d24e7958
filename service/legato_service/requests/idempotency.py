"""Idempotent calls: those with one request id of one tenant share a run."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

from google.protobuf.message import Message
from legato_engine.types import RequestKey

from legato_service.requests.registry import duplicate
from legato_service.rpc import call
from legato_service.rpc.call import Context

KEEP = 60.0  # seconds
MAX_REPLIES = 1024
MAX_BYTES = 16 * 1024 * 1024  # all serialized replies together
_INLINE_BYTES = 64 * 1024  # up to here hashed on the event loop

ReplyT = TypeVar("ReplyT", bound=Message)


async def fingerprint(method: str, received: bytes) -> bytes:
    """Hash a request; long ones on a worker thread."""
    if len(received) <= _INLINE_BYTES:
        return _hash(method, received)
    return await asyncio.to_thread(_hash, method, received)


def _hash(method: str, received: bytes) -> bytes:
    digest = hashlib.sha256(method.encode())
    digest.update(b"\0")
    digest.update(received)
    return digest.digest()


@dataclasses.dataclass(slots=True, eq=False)
class _Run:
    fingerprint: bytes
    task: asyncio.Task[Message]
    num_waiters: int = 0

    @property
    def is_abandoned(self) -> bool:
        """Return whether all callers left, so that the run is being cancelled."""
        return self.num_waiters == 0


class _CachedReply(NamedTuple):
    fingerprint: bytes
    reply: Message | None  # None: the key was a stream's
    num_bytes: int
    expires_at: float  # time.monotonic() seconds


class IdempotencyCache:
    """Cache with one run per key and content; its reply stays for `keep` seconds.

    A call that joins a run gets its reply or its failure, and the deadline of the first call. The
    last call that is cancelled cancels the run. Failures are not kept, so that a retry may succeed.
    Beyond `max_replies` or `max_bytes`, the least recently used replies go.
    """

    def __init__(
        self, *, keep: float = KEEP, max_replies: int = MAX_REPLIES, max_bytes: int = MAX_BYTES
    ) -> None:
        self._keep_seconds = keep
        self._max_replies = max_replies
        self._max_bytes = max_bytes
        self._runs: dict[RequestKey, _Run] = {}
        self._replies: collections.OrderedDict[RequestKey, _CachedReply] = collections.OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        """Return the number of replies, including expired ones."""
        return len(self._replies)

    @property
    def num_waiting(self) -> int:
        return sum(run.num_waiters for run in self._runs.values())

    async def get_or_run(
        self,
        key: RequestKey,
        fingerprint: bytes,
        work: Callable[[float | None], Coroutine[Any, Any, ReplyT]],
        context: Context,
    ) -> ReplyT:
        """Return the kept reply of this key, or that of a run in flight, or else of `work`.

        `work` takes the time left to this call, None without a deadline.

        Raises:
            RequestIdInUse: the key belongs to a call with another fingerprint.
            Exception: whatever the run raises.
        """
        while (run := self._runs.get(key)) is not None and run.is_abandoned:
            await asyncio.wait({run.task})
        cached = None if run is not None else self._look_up(key)
        known = run or cached
        if known is not None and known.fingerprint != fingerprint:
            raise duplicate(key)
        if cached is not None:
            call.current().reply = "kept"
            return cast("ReplyT", cached.reply)  # fingerprints differ between methods and streams
        if run is not None:
            rpc = call.current()
            rpc.reply, left = "joined", context.time_remaining()
            if left is not None:
                rpc.deadline = time.monotonic() + left
        else:
            run = self._start(key, fingerprint, work(context.time_remaining()))
        return cast("ReplyT", await self._wait(run))

    def forget_stream(self, key: RequestKey) -> None:
        """Free the key of a stream that ended; the key of a unary call stays."""
        cached = self._replies.get(key)
        if cached is not None and cached.reply is None:
            self._drop(key)

    @contextmanager
    def exclusive(self, key: RequestKey) -> Iterator[None]:
        """Reserve the key for a stream, and for `keep` seconds after a block that ended well.

        Raises:
            RequestIdInUse: the key is known.
        """
        if key in self._runs or self._look_up(key) is not None:
            raise duplicate(key)
        yield
        self._keep(key, b"", None)

    def _start(
        self, key: RequestKey, fingerprint: bytes, work: Coroutine[Any, Any, Message]
    ) -> _Run:
        task = asyncio.create_task(work, name=f"shared {key.name}")
        run = self._runs[key] = _Run(fingerprint, task)
        task.add_done_callback(functools.partial(self._on_end, key))
        return run

    async def _wait(self, run: _Run) -> Message:
        run.num_waiters += 1
        try:
            return await asyncio.shield(run.task)
        finally:
            run.num_waiters -= 1
            if run.is_abandoned:
                run.task.cancel()  # no effect on a task that ended

    def _on_end(self, key: RequestKey, task: asyncio.Task[Message]) -> None:
        run = self._runs.pop(key)
        if not task.cancelled() and task.exception() is None:
            self._keep(key, run.fingerprint, task.result())

    def _look_up(self, key: RequestKey) -> _CachedReply | None:
        cached = self._replies.get(key)
        if cached is None:
            return None
        if cached.expires_at <= time.monotonic():
            self._drop(key)
            return None
        self._replies.move_to_end(key)
        return cached

    def _keep(self, key: RequestKey, fingerprint: bytes, reply: Message | None) -> None:
        if key in self._replies:
            self._drop(key)
        num_bytes = 0 if reply is None else reply.ByteSize()
        expires_at = time.monotonic() + self._keep_seconds
        self._replies[key] = _CachedReply(fingerprint, reply, num_bytes, expires_at)
        self._num_bytes += num_bytes
        while len(self._replies) > self._max_replies or self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._replies)))

    def _drop(self, key: RequestKey) -> None:
        self._num_bytes -= self._replies.pop(key).num_bytes
