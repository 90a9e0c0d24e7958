"""The callers in a service process that watch the engine's timeline."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncGenerator, Callable

from legato_engine.ipc.messages import TimelineBatch

MAX_UNREAD = 64
"""Batches that a watcher may leave unread; beyond it the oldest are dropped."""


class _Watcher:
    """The unread batches of one caller."""

    def __init__(self) -> None:
        self.batches: collections.deque[TimelineBatch] = collections.deque(maxlen=MAX_UNREAD)
        self.arrived = asyncio.Event()


class TimelineWatch:
    """Asks the engine for its timeline while a caller watches. Belongs to one event loop.

    `ask` tells the engine to begin or to end; call `renew` when another engine is ready.
    """

    def __init__(self, ask: Callable[[bool], None]) -> None:
        self._ask = ask
        self._watchers: set[_Watcher] = set()

    def renew(self) -> None:
        if self._watchers:
            self._ask(True)

    def deliver(self, batch: TimelineBatch) -> None:
        for watcher in self._watchers:
            watcher.batches.append(batch)
            watcher.arrived.set()

    async def batches(self, seconds: float | None = None) -> AsyncGenerator[TimelineBatch, None]:
        """Yield the batches of so many seconds, or until the generator is closed."""
        until = None if seconds is None else asyncio.get_running_loop().time() + seconds
        watcher = _Watcher()
        self._watchers.add(watcher)
        self.renew()
        try:
            while True:
                while watcher.batches:
                    yield watcher.batches.popleft()
                watcher.arrived.clear()
                try:
                    async with asyncio.timeout_at(until):
                        await watcher.arrived.wait()
                except TimeoutError:
                    return
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._ask(False)
