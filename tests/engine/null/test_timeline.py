"""The timeline of a null engine's process, which has the host's commits alone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from contextlib import aclosing
from typing import Any

import pytest
from legato_engine.client.engine_client import EngineClient, EngineLimits
from legato_engine.config import EngineConfig
from legato_engine.types import QueryTask, Request, RequestKey, SamplingParams

from tests.service.harness import until

CONFIG = EngineConfig(model="null", heartbeat_interval=0.05, null_step_ms=2)
pytestmark = pytest.mark.usefixtures("child_python_path")


@contextlib.asynccontextmanager
async def running():
    """A ready client of an engine that answers requests one after the other."""
    client = EngineClient(CONFIG, limits=EngineLimits(backoff_first=0.05))
    await client.start()
    try:
        await client.wait_ready()
        asking = asyncio.create_task(ask(client))
        yield client
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    finally:
        await client.close()


async def ask(client):
    """Submit requests without an end; they outlive an engine."""
    for number in itertools.count():
        request = Request(
            request_id=RequestKey(f"r{number}"),
            task=QueryTask(question="what is it?"),
            sampling=SamplingParams(max_tokens=40),
        )
        await client.submit(request, may_wait=True).done()


async def read(batches, count):
    """Return what the next batches with spans say."""
    found: list[Any] = []
    while len(found) < count:
        found.append(await anext(batches))
    return found


async def test_what_a_real_engine_tells_its_watchers():
    """Two watchers share an engine's batches, and nothing comes after the last has left.

    Those of another engine continue with a start of their own.
    """
    async with asyncio.timeout(100), running() as client:
        one, two = client.timeline.batches(), client.timeline.batches()
        async with aclosing(one), aclosing(two):
            first, second = await asyncio.gather(read(one, 3), read(two, 3))
            shared = {id(each.batch) for each in first} & {id(each.batch) for each in second}
            assert len(shared) >= 2
            assert {each.lost for each in (*first, *second)} == {0}
            spans = [span for each in first for span in each.batch.spans]
            launches = [span.launch for span in spans]
            assert launches == list(range(launches[0], launches[0] + len(launches)))
            assert {(span.lane, span.rows, span.tokens) for span in spans} == {("cpu commit", 1, 1)}

            started = first[0].batch.started
            os.kill(client.pid, signal.SIGKILL)
            while (after := await anext(one)).batch.started == started:
                pass
            assert after.lost == 0
            assert after.batch.spans[0].launch < launches[-1]

        arrived: list[Any] = []
        client.timeline.deliver = arrived.append
        step = client.step
        await until(lambda: client.step > step + 100)  # some heartbeats and periods later
        left = len(arrived)  # what was on its way
        await until(lambda: client.step > step + 250)
        assert len(arrived) == left
