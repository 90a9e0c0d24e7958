"""Waits that share a timer."""

import asyncio
import math
import time
from collections.abc import Coroutine
from contextlib import closing

import pytest
from legato_service.rpc.reusable_timeout import ReusableTimeout

from tests.simulation.virtual_time import virtual_time


def run(scenario: Coroutine[object, object, None]) -> None:
    """Run to its end, in virtual time: what passes between two steps is not the machine's."""
    with virtual_time() as loop:
        loop.run_until_complete(scenario)


def test_each_wait_has_its_own_end():
    """Each wait has its own end, whatever earlier waits had."""

    async def scenario():
        with closing(ReusableTimeout()) as timeout:
            for _ in range(2):
                with pytest.raises(TimeoutError), timeout.until(time.monotonic() + 0.02):
                    await asyncio.Event().wait()
                with timeout.until(time.monotonic() + 60):
                    await asyncio.sleep(0.03)
            with timeout.until(math.inf):
                await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    run(scenario())


def test_a_short_wait_may_follow_a_long_one():
    """A short wait after a long one ends at its own moment."""

    async def scenario():
        with closing(ReusableTimeout()) as timeout:
            with timeout.until(time.monotonic() + 60):
                await asyncio.sleep(0)
            end = time.monotonic() + 0.02
            with pytest.raises(TimeoutError), timeout.until(end):
                await asyncio.sleep(30)
            assert time.monotonic() == pytest.approx(end)

    run(scenario())


def test_time_between_waits_is_not_bounded():
    """Work outside of a wait is not bounded by the wait before."""

    async def scenario():
        with closing(ReusableTimeout()) as timeout:
            with timeout.until(time.monotonic() + 0.02):
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)

    run(scenario())


def test_a_cancellation_stays_a_cancellation():
    """Only the end of a wait becomes a TimeoutError."""

    async def wait():
        with closing(ReusableTimeout()) as timeout, timeout.until(time.monotonic() + 60):
            await asyncio.Event().wait()

    async def scenario():
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(scenario())
