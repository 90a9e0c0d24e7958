"""An asyncio loop that does not sleep for a while."""

import asyncio

from legato_engine.ipc.latency_policy import BusyPoll

from tests.engine.ipc.both_ends import until


async def test_polling_ends_by_itself():
    """After its time, which a later extension prolongs but does not repeat."""
    poll = BusyPoll()
    poll.extend(0.0)
    poll.extend(0.001)
    assert poll.active
    await until(lambda: not poll.active)
    poll.extend(0.0)
    await asyncio.sleep(0)
    assert not poll.active


async def test_polling_can_be_ended():
    """At the loop's next turn, and begun again."""
    poll = BusyPoll()
    for _ in range(2):
        poll.extend(3600.0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert poll.active
        poll.end()
        await asyncio.sleep(0)
        assert not poll.active
