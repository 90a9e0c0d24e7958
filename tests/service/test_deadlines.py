"""One timer for the deadlines of all requests."""

import asyncio
import math
import time

from legato_engine.errors import DeadlineExceeded
from legato_service.deadlines import Deadlines


class Watched:
    """A stream that notes how it was ended."""

    def __init__(self, order):
        self.over = asyncio.Event()
        self._order = order

    def abort(self, error=None):
        """Ended, by this."""
        assert isinstance(error, DeadlineExceeded)
        self._order.append(self)
        self.over.set()


async def test_each_deadline_is_met_in_its_turn():
    """Those that come first end first, in whatever order they were named; others are left alone."""
    deadlines, order, now = Deadlines(), [], time.monotonic()
    late, early, forgotten, endless = (Watched(order) for _ in range(4))
    for stream, deadline in (
        (late, now + 0.2),
        (forgotten, now + 0.01),
        (endless, math.inf),
        (early, now + 0.05),
    ):
        deadlines.watch(stream, deadline)
    deadlines.forget(forgotten)
    await late.over.wait()
    assert order == [early, late]
    assert time.monotonic() >= now + 0.2


async def test_a_deadline_is_watched_after_all_others_have_passed():
    """A timer that had nothing left to wait for is set again."""
    deadlines, order = Deadlines(), []
    for _ in range(2):
        stream = Watched(order)
        deadlines.watch(stream, time.monotonic())
        await stream.over.wait()
    assert len(order) == 2


async def test_forgetting_twice_is_harmless():
    """A stream may be forgotten after its time, and without having been watched."""
    deadlines = Deadlines()
    stream = Watched([])
    deadlines.watch(stream, time.monotonic())
    await stream.over.wait()
    deadlines.forget(stream)
    deadlines.forget(Watched([]))
