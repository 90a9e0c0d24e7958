"""Watch of the engine's timeline, for the callers of a service process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from legato_engine.ipc.messages import TimelineBatch

MAX_UNREAD = 64
"""Maximum unread batches of a watcher; beyond it the oldest are dropped."""


class Watched(NamedTuple):
    """A batch, and the number of missing launches before it."""

    batch: TimelineBatch
    lost: int


class _Watcher:
    """Unread batches of one caller."""

    def __init__(self) -> None:
        self._unread: asyncio.Queue[TimelineBatch] = asyncio.Queue(MAX_UNREAD)
        self._engine: int | None = None  # start time of the last read batch's engine
        self._next_launch = 0

    def put(self, batch: TimelineBatch) -> None:
        if self._unread.full():
            self._unread.get_nowait()
        self._unread.put_nowait(batch)

    async def read(self) -> Watched:
        """Return the next batch; gaps in the launch numbers are missing launches."""
        batch = await self._unread.get()
        lost = 0
        if batch.spans:
            first, last = batch.spans[0].launch, batch.spans[-1].launch
            if batch.started == self._engine:
                lost = max(0, first - self._next_launch)
            self._engine, self._next_launch = batch.started, last + 1
        return Watched(batch, lost)


class TimelineWatch:
    """Subscription to the engine's timeline while a caller watches; belongs to one event loop.

    `ask` makes the engine start or stop sending; call `renew` when another engine is ready.
    """

    def __init__(self, ask: Callable[[bool], None]) -> None:
        self._ask = ask
        self._watchers: set[_Watcher] = set()

    def renew(self) -> None:
        if self._watchers:
            self._ask(True)

    def deliver(self, batch: TimelineBatch) -> None:
        for watcher in self._watchers:
            watcher.put(batch)

    async def batches(self, seconds: float | None = None) -> AsyncGenerator[Watched, None]:
        """Yield batches for the given seconds, or until the generator is closed."""
        until = None if seconds is None else asyncio.get_running_loop().time() + seconds
        watcher = _Watcher()
        self._watchers.add(watcher)
        self.renew()
        try:
            while True:
                try:
                    async with asyncio.timeout_at(until):
                        watched = await watcher.read()
                except TimeoutError:
                    return
                yield watched
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._ask(False)
