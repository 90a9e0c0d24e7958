"""Callers that watch the timeline."""

import asyncio
from contextlib import aclosing

from legato_engine.client.timeline_watch import MAX_UNREAD, TimelineWatch
from legato_engine.ipc.messages import TimelineBatch, TimelineSpan


def batch(number, *, started=1):
    """Return a batch of one span with this launch, of the engine that started then."""
    span = TimelineSpan("slot 0", "held", 0, 1, number, "decode", 1, 0, 0)
    return TimelineBatch(spans=(span,), started=started)


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
        assert (await task).batch.spans[0].launch == 1
    assert asked == [True, True, False]


async def test_a_slow_watcher_loses_the_oldest():
    """What a caller leaves unread is bounded, and it is told how much it lost."""
    watch = TimelineWatch(lambda _: None)
    async with aclosing(watch.batches()) as batches:
        watch.deliver(batch(0))  # before the first read: not watched yet
        task = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        watch.deliver(batch(1))
        assert (await task).lost == 0
        for number in range(2, MAX_UNREAD + 10):
            watch.deliver(batch(number))
        first, second = await anext(batches), await anext(batches)
        assert (first.batch.spans[0].launch, first.lost) == (10, 8)
        assert (second.batch.spans[0].launch, second.lost) == (11, 0)


async def test_what_the_engine_dropped_counts_as_lost():
    """Launches are numbered, so it does not matter who lost them."""
    watch = TimelineWatch(lambda _: None)
    async with aclosing(watch.batches()) as batches:
        task = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        for number in (5, 9):
            watch.deliver(batch(number))
        assert ((await task).lost, (await anext(batches)).lost) == (0, 3)


async def test_the_launches_of_another_engine_begin_anew():
    """No launch is lost between an engine and the next, whatever their numbers."""
    watch = TimelineWatch(lambda _: None)
    async with aclosing(watch.batches()) as batches:
        task = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        for number, started in ((5, 1), (9, 2), (0, 3), (2, 3)):
            watch.deliver(batch(number, started=started))
        lost = [(await task).lost, *[(await anext(batches)).lost for _ in range(3)]]
        assert lost == [0, 0, 0, 1]


async def test_watchers_share_what_the_engine_sends():
    """The engine is asked to end only when the last one leaves, and nothing is kept then."""
    asked: list[bool] = []
    watch = TimelineWatch(asked.append)
    first, second = watch.batches(), watch.batches()
    tasks = [asyncio.ensure_future(anext(each)) for each in (first, second)]
    await asyncio.sleep(0)
    shared = batch(1)
    watch.deliver(shared)
    assert [(await task).batch is shared for task in tasks] == [True, True]
    await first.aclose()
    assert False not in asked
    await second.aclose()
    assert asked[-1] is False
    assert not watch._watchers
