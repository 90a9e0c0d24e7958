"""The callers in a service process that watch the engine's timeline."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from legato_engine.ipc.messages import TimelineBatch

MAX_UNREAD = 64
"""Batches that a watcher may leave unread; beyond it the oldest are dropped."""


class Watched(NamedTuple):
    """A batch, and how many launches are missing between the one before and it."""

    batch: TimelineBatch
    lost: int


class _Watcher:
    """The unread batches of one caller."""

    def __init__(self) -> None:
        self.batches: collections.deque[TimelineBatch] = collections.deque(maxlen=MAX_UNREAD)
        self.arrived = asyncio.Event()
        self._engine: int | None = None  # that of the last batch read, by its start
        self._next_launch = 0

    def read(self) -> Watched:
        """Launches of an engine are numbered in a row, whoever lost those that are missing."""
        batch = self.batches.popleft()
        lost = 0
        if batch.spans:
            first, last = batch.spans[0].launch, batch.spans[-1].launch
            if batch.started == self._engine:
                lost = max(0, first - self._next_launch)
            self._engine, self._next_launch = batch.started, last + 1
        return Watched(batch, lost)


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

    async def batches(self, seconds: float | None = None) -> AsyncGenerator[Watched, None]:
        """Yield the batches of so many seconds, or until the generator is closed."""
        until = None if seconds is None else asyncio.get_running_loop().time() + seconds
        watcher = _Watcher()
        self._watchers.add(watcher)
        self.renew()
        try:
            while True:
                while watcher.batches:
                    yield watcher.read()
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
