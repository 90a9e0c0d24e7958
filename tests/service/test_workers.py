"""Several service processes on one port before one engine: deaths, drains and metrics."""

import asyncio
import contextlib
import os
import signal
import socket
from contextlib import asynccontextmanager

import grpc
import pytest
from legato.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, task_pb2
from legato_engine.shm import blob_folder
from legato_service.metrics.snapshot import Series, Snapshot, merged
from legato_service.workers import control_channel
from legato_service.workers.control_channel import ControlChannel, MetricsExchange, WorkerMetrics
from legato_service.workers.processes import reserved

from tests.e2e.server import children, exists
from tests.service.harness import read_refusal, until
from tests.service.test_service_process import question, service, stub

# ---------------------------------------------------------------- processes
# Several service processes on one port before one engine: deaths, drains and aborts.

CONNECTIONS = 24  # all of them on one of two processes is practically impossible

CANCELLED = task_pb2.FINISH_REASON_CANCELLED


def stream_request(text, request_id=""):
    """A request for a stream."""
    task = task_pb2.Task(query=task_pb2.QueryTask(question=text))
    options = inference_pb2.RequestOptions(request_id=request_id)
    return inference_pb2.GenerateRequest(task=task, options=options)


class Clients:
    """`CONNECTIONS` channels to one address, with a connection each."""

    def __init__(self, address):
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        self._address = address
        self.channels = [
            grpc.aio.insecure_channel(address, options=options) for _ in range(CONNECTIONS)
        ]

    async def begin(self, text):
        """Start a stream on each channel."""
        streams = [stub(channel).Generate(stream_request(text)) for channel in self.channels]
        for event in await asyncio.gather(*(stream.read() for stream in streams)):
            assert event.HasField("started")
        return streams

    async def running(self):
        """Requests that the engine runs, by the last heartbeat of some process."""
        load = await admin_pb2_grpc.AdminServiceStub(self.channels[0]).GetLoad(
            admin_pb2.GetLoadRequest(), wait_for_ready=True
        )
        return load.running

    async def close(self):
        """Close all channels."""
        for channel in self.channels:
            await channel.close()


@contextlib.asynccontextmanager
async def two_processes(*arguments):
    """Two service processes, and clients with connections to both."""
    async with service("--processes", "2", *arguments) as running:
        worker = (await running.line("worker_ready"))["pid"]
        clients = Clients((await running.line("ready"))["address"])
        try:
            yield running, worker, clients
        finally:
            await clients.close()


async def ended(stream):
    """Read a stream to its end; return its last event or its error."""
    last = None
    try:
        while (event := await stream.read()) is not grpc.aio.EOF:
            last = event
    except grpc.aio.AioRpcError as error:
        return read_refusal(error)
    return last


async def reply_of(channel):
    """The answer to "again" of the process of a channel, or the reason of its error."""
    try:
        return (await stub(channel).Query(question("again"))).answer
    except grpc.aio.AioRpcError as error:
        return read_refusal(error).reason


async def until_reply(channel, word):
    """Repeat until `reply_of` is `word`."""
    while await reply_of(channel) != word:  # noqa: ASYNC110 - the answer is another process's
        await asyncio.sleep(0.01)


async def until_async(condition):
    """Poll until `condition` holds."""
    while not await condition():  # noqa: ASYNC110 - the condition is another process's
        await asyncio.sleep(0.01)


async def test_a_killed_worker_fails_its_own_calls_only():
    """Both processes serve; the calls of a killed worker alone fail and are aborted.

    Another worker replaces it.
    """
    async with two_processes() as (running, worker, clients):
        streams = await clients.begin("wait")
        endings = [asyncio.create_task(ended(stream)) for stream in streams]

        async def all_run():
            return await clients.running() == CONNECTIONS

        await until_async(all_run)
        os.kill(worker, signal.SIGKILL)
        lost = await running.line("worker_lost")
        assert (lost["number"], lost["exit_code"]) == (1, -signal.SIGKILL)
        second = (await running.line("worker_ready"))["pid"]
        assert second != worker

        async def forgotten():
            return await clients.running() == sum(not each.done() for each in endings)

        await until(lambda: any(each.done() for each in endings))
        await until_async(forgotten)
        gone = [each.result() for each in endings if each.done()]
        assert 0 < len(gone) < CONNECTIONS
        assert {each.code for each in gone} == {grpc.StatusCode.UNAVAILABLE}
        for channel in clients.channels:
            assert (await stub(channel).Query(question("again"), wait_for_ready=True)).answer
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*endings, return_exceptions=True)


async def test_a_killed_engine_fails_no_call(tmp_path):
    """Every open call of every process goes on with the next engine, and all serve again."""
    async with two_processes() as (running, worker, clients):
        streams = await clients.begin(f"until {tmp_path / 'end'}")
        (engine,) = set(children(running.process.pid)) - {worker}
        os.kill(engine, signal.SIGKILL)
        await running.line("engine_lost")
        for channel in clients.channels:
            await until_reply(channel, "again")
        (tmp_path / "end").touch()
        for stream in streams:
            assert (await ended(stream)).finished.info.resumptions == 1
        assert exists(worker)


@pytest.mark.real_start
async def test_all_processes_end_with_the_first():
    """When the first process is killed, the engine and the worker end."""
    async with two_processes() as (running, worker, clients):
        await clients.begin("wait")
        others = children(running.process.pid)
        assert len(others) == 2
        assert worker in others
        running.process.kill()
        await until(lambda: not any(exists(pid) for pid in others))


@pytest.mark.parametrize("drain_by", ["signal", "rpc"])
async def test_a_drain_reaches_all_processes(drain_by, tmp_path):
    """After a signal to the first process or an RPC to a worker, all refuse, finish and exit."""
    async with two_processes() as (running, _, clients):
        streams = await clients.begin(f"until {tmp_path / 'end'}")
        others = children(running.process.pid)
        if drain_by == "signal":
            running.process.terminate()
        else:
            await drain_by_worker(running.process, clients)
        await running.line("drain_begun")
        for channel in clients.channels:
            await until_reply(channel, "DRAINING")
        (tmp_path / "end").touch()
        for stream in streams:
            assert (await ended(stream)).HasField("finished")
        assert await running.code() == 0
        assert not any(exists(pid) for pid in others)
        assert not list(blob_folder().glob(f"legato-{running.process.pid}-*"))


async def test_an_abort_reaches_every_process():
    """An id, or all, is stopped in every process, and counted."""
    async with two_processes() as (_, _, clients):
        admin = admin_pb2_grpc.AdminServiceStub(clients.channels[0])
        streams = await clients.begin("wait")
        one = stub(clients.channels[1]).Generate(stream_request("wait", "one"))
        assert (await one.read()).HasField("started")
        stopped = [
            (await admin.Abort(admin_pb2.AbortRequest(request_id=name))).aborted
            for name in ("one", "one", "another")
        ]
        assert stopped == [1, 0, 0]
        assert (await ended(one)).finished.info.finish_reason == CANCELLED
        assert (await admin.Abort(admin_pb2.AbortRequest(all=True))).aborted == CONNECTIONS
        for stream in streams:
            assert (await ended(stream)).finished.info.finish_reason == CANCELLED


async def drain_by_worker(first, clients):
    """Have a worker get the Drain: the first process is stopped meanwhile."""
    first.send_signal(signal.SIGSTOP)
    calls = [
        admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest())
        for channel in clients.channels
    ]
    await asyncio.wait(
        [asyncio.ensure_future(call.code()) for call in calls],
        return_when=asyncio.FIRST_COMPLETED,
    )
    assert [await call.code() for call in calls if call.done()][:1] == [grpc.StatusCode.OK]
    for call in calls:
        call.cancel()
    first.send_signal(signal.SIGCONT)


async def test_the_grace_ends_in_all_processes():
    """Open calls are aborted and all processes exit."""
    async with two_processes("--drain-grace", "0.3") as (running, _, clients):
        streams = await clients.begin("wait")
        others = children(running.process.pid)
        running.process.terminate()
        for stream in streams:
            assert (await ended(stream)).code is grpc.StatusCode.UNAVAILABLE
        assert await running.code() == 0
        assert not any(exists(pid) for pid in others)


@pytest.mark.parametrize(("first", "second"), [("1", "2"), ("2", "1"), ("2", "2")])
async def test_a_port_is_shared_within_a_server_only(first, second):
    """A second server on the same port fails, however many processes either has."""
    async with service("--processes", first) as taken:
        address = (await taken.line("ready"))["address"]
        async with service("--processes", second, "--listen", address) as late:
            assert (await late.line("listen_failed"))["listen"] == address
            assert await late.code() == 1


# ---------------------------------------------------------------- the shared port


def listening(port, *, shared):
    """A listening socket, with or without SO_REUSEPORT."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
    listener.bind(("127.0.0.1", port))
    listener.listen()
    return listener


def port_of(listen):
    """The port in host:port."""
    return int(listen.rpartition(":")[2])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_only_sharing_sockets_can_listen(host):
    """Port 0 becomes a real port, on which only sockets with SO_REUSEPORT can listen."""
    with reserved(f"{host}:0") as listen:
        port = port_of(listen)
        assert listen == f"{host}:{port}"
        assert port
        with listening(port, shared=True), listening(port, shared=True):
            pass
        with pytest.raises(OSError, match="in use"):
            listening(port, shared=False)
        with pytest.raises(OSError, match="in use"), reserved(listen):
            pass
    with listening(port, shared=False):
        pass


@pytest.mark.parametrize("shared", [True, False])
def test_a_port_in_use_is_refused(shared):
    """Also when the other server set SO_REUSEPORT."""
    with listening(0, shared=shared) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match="in use"), reserved(f"127.0.0.1:{port}"):
            pass


def test_a_host_without_an_address_is_refused():
    """An unknown host name raises OSError."""
    with pytest.raises(OSError, match=r"known|resolution"), reserved("no-such-host.invalid:0"):
        pass


# ---------------------------------------------------------------- metrics exchange
# Metrics of several processes added up.


def snapshot(count, sessions=1):
    """A counter, a gauge and a histogram."""
    return Snapshot(
        [
            Series("legato_rpcs", ("m", "OK", ""), [count]),
            Series("legato_sessions_open", (), [sessions]),
            Series("legato_event_loop_lag_seconds", (), [count, 1, 0.5]),
        ]
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
    """The values of a snapshot by name, without histograms."""
    return {each.name: each.values[0] for each in found.series if len(each.values) == 1}


def test_counters_gauges_and_histograms_add_up():
    """What has the same name and labels is one series."""
    other = Snapshot([Series("legato_rpcs", ("n", "OK", ""), [1])])
    both = merged((snapshot(3), snapshot(4), other))
    assert values(both)["legato_sessions_open"] == 2
    assert {each.labels[0]: each.values for each in both.series if each.labels} == {
        "m": [7],
        "n": [1],
    }
    (histogram,) = both.named("legato_event_loop_lag_seconds")
    assert histogram.values == [7, 2, 1.0]


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
