"""An asyncio loop whose clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

START = 1000.0  # seconds


class NothingLeft(Exception):
    """No callback is due and no timer is set, but the main task has not ended."""


class _NoWait(selectors.DefaultSelector):
    """Polls, and lets the clock jump instead of waiting."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeft
        self._loop.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs without sockets, threads or signals. `now` is in seconds."""

    def __init__(self) -> None:
        self.now = START
        super().__init__(_NoWait(self))

    def time(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return round(self.now * 1e9)


@contextmanager
def virtual_time() -> Iterator[VirtualLoop]:
    """Yield a loop that also drives `time.monotonic` and `time.perf_counter_ns`."""
    loop = VirtualLoop()
    with (
        mock.patch.object(time, "monotonic", loop.time),
        mock.patch.object(time, "perf_counter_ns", loop.time_ns),
    ):
        try:
            yield loop
        finally:
            loop.close()
