"""Callers that watch the timeline."""

import asyncio
from contextlib import aclosing

from legato_engine.client.timeline_watch import MAX_UNREAD, TimelineWatch
from legato_engine.ipc.messages import TimelineBatch, TimelineSpan


def batch(number):
    """Return a batch of one span with this launch."""
    span = TimelineSpan("slot 0", "held", 0, 1, number, "decode", 1, 0, 0)
    return TimelineBatch(spans=(span,))


async def test_the_engine_is_asked_while_a_caller_watches():
    """The first watcher begins, a new engine is asked again, the last watcher ends it."""
    asked: list[bool] = []
    watch = TimelineWatch(asked.append)
    watch.renew()
    assert asked == []
    batches = watch.batches()
    async with aclosing(batches):
        pending = anext(batches)
        task = asyncio.ensure_future(pending)
        await asyncio.sleep(0)
        assert asked == [True]
        watch.renew()
        watch.deliver(batch(1))
        assert (await task).spans[0].launch == 1
    assert asked == [True, True, False]


async def test_a_slow_watcher_loses_the_oldest():
    """What a caller leaves unread is bounded."""
    watch = TimelineWatch(lambda _: None)
    async with aclosing(watch.batches()) as batches:
        watch.deliver(batch(0))  # before the first read: not watched yet
        task = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        for number in range(1, MAX_UNREAD + 10):
            watch.deliver(batch(number))
        first = await task
        assert first.spans[0].launch == 10
