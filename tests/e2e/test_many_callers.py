"""Many clients at once, and many requests one after the other."""

import asyncio
import functools
import itertools
import random

import pytest
from legato_client import (
    AsyncClient,
    CaptionTask,
    DetectTask,
    Finished,
    Options,
    QueryTask,
    Sampling,
)

from tests.e2e.jobs import WILD, ask_async, jobs
from tests.e2e.scenes import two_shapes
from tests.e2e.server import open_files, own_bytes, until

MEBIBYTE = 1024 * 1024
GROWTH = (8 * MEBIBYTE, 24 * MEBIBYTE)
"""Memory that service and engine may gain over the requests of a round.

Allocators keep what they once had. A prepared image is 1.3 MiB in the engine, and a round brings
30 new ones, so a leak of them passes this bound.
"""


async def test_64_callers_are_all_answered(server, alone):
    """Each of 64 connections gets its own answer, once, and the right one."""
    chosen = [random.Random(number).randrange(len(alone)) for number in range(64)]
    bag = jobs()

    async def call(job):
        async with AsyncClient(server.address) as caller:
            return await ask_async(caller, job)

    answers = await asyncio.gather(*(call(bag[number]) for number in chosen))
    assert answers == [alone[number] for number in chosen]
    await asyncio.to_thread(server.settle)


async def test_64_streams_are_all_finished(server):
    """Each of 64 streams on one connection ends with its own result, once."""
    scene = two_shapes().image
    async with AsyncClient(server.address) as caller:

        async def read(number):
            options = Options(request_id=f"stream-{number}")
            task = DetectTask("red circle", task_id=str(number))
            events = [event async for event in caller.generate(scene, task, options=options)]
            (last,) = [event for event in events if isinstance(event, Finished)]
            return last.result

        results = await asyncio.gather(*map(read, range(64)))
    assert [result.task_id for result in results] == [str(number) for number in range(64)]
    assert [result.info.request_id for result in results] == [f"stream-{n}" for n in range(64)]
    assert all(result.objects == results[0].objects for result in results)
    assert len(results[0].objects) == 1


LANES = 8


class Worker:
    """Requests of every kind; one in eight brings a new image, one in eight is abandoned."""

    def __init__(self, address):
        self._address = address
        self._offsets = itertools.cycle(range(60))

    async def run(self, count):
        """That many requests, eight at a time."""
        numbers = iter(range(count))
        async with AsyncClient(self._address) as caller:
            await asyncio.gather(*(self._lane(caller, numbers) for _ in range(LANES)))

    async def _lane(self, caller, numbers):
        known = two_shapes().image
        for number in numbers:
            match number % 8:
                case 0:
                    image = two_shapes(next(self._offsets)).image
                    await caller.detect(image, "red circle", options=Options(cache_image=False))
                case 1:
                    await caller.run_tasks(known, [CaptionTask("short"), DetectTask("square")])
                case 2:
                    events = caller.generate(known, QueryTask("hello", sampling=WILD))
                    await anext(events)
                    await events.aclose()
                case 3:
                    [event async for event in caller.generate(known, CaptionTask("short"))]
                case _:
                    await caller.query(None, "hello", sampling=Sampling(max_tokens=3))


LONG = (pytest.mark.slow, pytest.mark.timeout(600))  # minutes, on a slow machine


@pytest.mark.parametrize("count", [240, pytest.param(3000, marks=LONG)])
async def test_memory_and_files_stay(server, count):
    """After a warm-up, hundreds of requests leave memory within a bound, and no file open."""
    worker = Worker(server.address)
    await worker.run(60)
    await asyncio.to_thread(server.settle)
    pids = (server.process.pid, server.engine_pid)
    memory = [own_bytes(pid) for pid in pids]
    files = [open_files(pid) for pid in pids]
    await worker.run(count)
    await asyncio.to_thread(server.settle)
    gained = [own_bytes(pid) - before for pid, before in zip(pids, memory, strict=True)]
    for pid, size, before, bound in zip(pids, gained, files, GROWTH, strict=True):
        assert size < bound
        await asyncio.to_thread(until, functools.partial(_opened_no_more, pid, before))


def _opened_no_more(pid, before):
    """But for the files that a pool keeps: as many more as run at once. A leak is thirty."""
    return open_files(pid).total() <= before.total() + LANES
