"""Metrics of several processes added up."""

import asyncio
import socket
from contextlib import asynccontextmanager

from legato_service.metrics.snapshot import Bins, Snapshot, Value, merged
from legato_service.workers import control_channel
from legato_service.workers.control_channel import ControlChannel, MetricsExchange, WorkerMetrics


def snapshot(count, sessions=1):
    """A counter, a gauge and a histogram."""
    return Snapshot(
        [
            Value("legato_rpcs", ("m", "OK", ""), count),
            Value("legato_sessions_open", (), sessions),
        ],
        [Bins("legato_event_loop_lag_seconds", (), [count, 1], 0.5)],
    )


class Worker:
    """The far end of a control channel."""

    def __init__(self, count):
        self.count = count
        self.replies = True

    async def collect(self):
        """Reply with a snapshot, or never."""
        if not self.replies:
            await asyncio.Event().wait()
        return snapshot(self.count)


@asynccontextmanager
async def connected(worker):
    """The first process's exchange with a worker."""
    channels = [await ControlChannel.from_socket(end) for end in socket.socketpair()]
    ends = [
        MetricsExchange(channels[0], worker.collect),
        MetricsExchange(channels[1], worker.collect),
    ]

    async def listen(channel, exchange):
        while (message := await channel.receive()) is not None:
            exchange.receive(message)

    tasks = [asyncio.create_task(listen(*each)) for each in zip(channels, ends, strict=True)]
    try:
        yield ends[0]
    finally:
        for channel in channels:
            channel.close()
        for task in tasks:
            task.cancel()


def values(found):
    """The values of a snapshot by name."""
    return {each.name: each.value for each in found.values}


def test_counters_gauges_and_histograms_add_up():
    """What has the same name and labels is one series."""
    both = merged((snapshot(3), snapshot(4), Snapshot([Value("legato_rpcs", ("n", "OK", ""), 1)])))
    assert values(both)["legato_sessions_open"] == 2
    assert {each.labels[0]: each.value for each in both.values if each.labels} == {"m": 7, "n": 1}
    (bins,) = both.bins
    assert (bins.counts, bins.total) == ([7, 2], 1.0)


async def test_all_workers_count():
    """Each worker is asked anew."""
    metrics, first, second = WorkerMetrics(), Worker(3), Worker(4)
    async with connected(first) as one, connected(second) as other:
        metrics.add(1, one)
        metrics.add(2, other)
        assert values(await metrics.gather())["legato_rpcs"] == 7
        first.count = 10
        assert values(await metrics.gather())["legato_rpcs"] == 14


async def test_sums_never_fall(monkeypatch):
    """A silent worker counts with its last reply, a dead one in what only grows."""
    monkeypatch.setattr(control_channel, "TIMEOUT", 0.05)
    metrics, worker = WorkerMetrics(), Worker(3)
    async with connected(worker) as exchange:
        metrics.add(1, exchange)
        await metrics.gather()
        worker.replies = False
        silent = values(await metrics.gather())
        metrics.remove(1)
        dead = values(await metrics.gather())
        metrics.add(1, exchange)
        worker.replies, worker.count = True, 1
        restarted = values(await metrics.gather())
    assert silent == {"legato_rpcs": 3, "legato_sessions_open": 1}
    assert dead == {"legato_rpcs": 3}
    assert restarted == {"legato_rpcs": 4, "legato_sessions_open": 1}
