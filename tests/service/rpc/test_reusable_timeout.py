"""Waits that share a timer."""

import asyncio
import math
import time
from contextlib import closing

import pytest
from legato_service.rpc.reusable_timeout import ReusableTimeout


async def test_a_wait_that_lasts_too_long_times_out_and_the_next_one_starts_afresh():
    """Each wait has its own bound, whatever the ones before had."""
    with closing(ReusableTimeout()) as patience:
        for _ in range(2):
            with pytest.raises(TimeoutError), patience.until(time.monotonic() + 0.02):
                await asyncio.Event().wait()
            with patience.until(time.monotonic() + 60):
                await asyncio.sleep(0.03)
        with patience.until(math.inf):
            await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_wait_may_end_before_the_one_the_timer_was_made_for():
    """A short wait behind a long one is bounded by its own moment."""
    with closing(ReusableTimeout()) as patience:
        with patience.until(time.monotonic() + 60):
            await asyncio.sleep(0)
        start = time.monotonic()
        with pytest.raises(TimeoutError), patience.until(start + 0.02):
            await asyncio.sleep(30)


async def test_time_between_two_waits_is_nobodys():
    """What a task does outside of a wait is not bounded by the wait before."""
    with closing(ReusableTimeout()) as patience:
        with patience.until(time.monotonic() + 0.02):
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)


async def test_a_cancellation_from_outside_stays_one():
    """Only the bound of a wait becomes a TimeoutError."""

    async def wait():
        with closing(ReusableTimeout()) as patience, patience.until(time.monotonic() + 60):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
