"""Several service processes on one port, before one engine: who lives, who dies, who is told."""

import asyncio
import contextlib
import os
import signal

import grpc
import pytest
from legato.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, task_pb2
from legato_engine.shm.blob_store import blob_folder

from tests.e2e.server import children, exists
from tests.service.harness import read_refusal, until
from tests.service.test_service_process import question, service, stub

CONNECTIONS = 24  # that all of them go to one of two processes is as good as impossible

CANCELLED = task_pb2.FINISH_REASON_CANCELLED


def ask(text, request_id=""):
    """A request for a stream."""
    task = task_pb2.Task(query=task_pb2.QueryTask(question=text))
    options = inference_pb2.RequestOptions(request_id=request_id)
    return inference_pb2.GenerateRequest(task=task, options=options)


class Crowd:
    """Connections of their own to one address."""

    def __init__(self, address):
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        self._address = address
        self.channels = [
            grpc.aio.insecure_channel(address, options=options) for _ in range(CONNECTIONS)
        ]

    async def begin(self, text):
        """A stream on each, all of them started."""
        streams = [stub(channel).Generate(ask(text)) for channel in self.channels]
        for event in await asyncio.gather(*(stream.read() for stream in streams)):
            assert event.HasField("started")
        return streams

    async def running(self):
        """What the engine runs, as some process was told."""
        load = await admin_pb2_grpc.AdminServiceStub(self.channels[0]).GetLoad(
            admin_pb2.GetLoadRequest(), wait_for_ready=True
        )
        return load.running

    async def close(self):
        """All of them."""
        for channel in self.channels:
            await channel.close()


@contextlib.asynccontextmanager
async def crowded(*arguments):
    """Two service processes, and connections to them."""
    async with service("--processes", "2", *arguments) as running:
        follower = (await running.line("worker_ready"))["pid"]
        crowd = Crowd((await running.line("ready"))["address"])
        try:
            yield running, follower, crowd
        finally:
            await crowd.close()


async def ended(stream):
    """How a stream ended: its last event, or its refusal."""
    last = None
    try:
        while (event := await stream.read()) is not grpc.aio.EOF:
            last = event
    except grpc.aio.AioRpcError as error:
        return read_refusal(error)
    return last


async def said(channel):
    """What a connection's process says to "again": that, or the reason why not."""
    try:
        return (await stub(channel).Query(question("again"))).answer
    except grpc.aio.AioRpcError as error:
        return read_refusal(error).reason


async def until_said(channel, word):
    """Ask until the answer is this one."""
    while await said(channel) != word:  # noqa: ASYNC110 - the answer is another process's
        await asyncio.sleep(0.01)


async def until_async(condition):
    """Ask until it holds."""
    while not await condition():  # noqa: ASYNC110 - the condition is another process's
        await asyncio.sleep(0.01)


async def test_a_killed_process_takes_its_own_calls_only():
    """Both processes take calls. The calls of a killed one fail, the engine forgets them, the
    others go on, and another process takes its place.
    """
    async with crowded() as (running, follower, crowd):
        streams = await crowd.begin("wait")
        endings = [asyncio.create_task(ended(stream)) for stream in streams]

        async def all_run():
            return await crowd.running() == CONNECTIONS

        await until_async(all_run)
        os.kill(follower, signal.SIGKILL)
        lost = await running.line("worker_lost")
        assert (lost["number"], lost["exit_code"]) == (1, -signal.SIGKILL)
        second = (await running.line("worker_ready"))["pid"]
        assert second != follower

        async def forgotten():
            return await crowd.running() == sum(not each.done() for each in endings)

        await until(lambda: any(each.done() for each in endings))
        await until_async(forgotten)
        gone = [each.result() for each in endings if each.done()]
        assert 0 < len(gone) < CONNECTIONS
        assert {each.code for each in gone} == {grpc.StatusCode.UNAVAILABLE}
        for channel in crowd.channels:
            assert (await stub(channel).Query(question("again"), wait_for_ready=True)).answer
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*endings, return_exceptions=True)


async def test_a_killed_engine_is_told_by_all():
    """Every open call fails with ENGINE_LOST whichever process has it, and all serve again."""
    async with crowded() as (running, follower, crowd):
        streams = await crowd.begin("wait")
        (engine,) = set(children(running.process.pid)) - {follower}
        os.kill(engine, signal.SIGKILL)
        for stream in streams:
            assert (await ended(stream)).reason == "ENGINE_LOST"
        for channel in crowd.channels:
            await until_said(channel, "again")
        assert exists(follower)


async def test_nobody_outlives_the_first_process():
    """When the first process is killed, neither the engine nor another process is left."""
    async with crowded() as (running, follower, crowd):
        await crowd.begin("wait")
        others = children(running.process.pid)
        assert len(others) == 2
        assert follower in others
        running.process.kill()
        await until(lambda: not any(exists(pid) for pid in others))


@pytest.mark.parametrize("ask_by", ["signal", "rpc"])
async def test_a_drain_concerns_all(ask_by, tmp_path):
    """A signal to the first process or an RPC to another: all refuse, finish, and leave."""
    async with crowded() as (running, _, crowd):
        streams = await crowd.begin(f"until {tmp_path / 'end'}")
        others = children(running.process.pid)
        if ask_by == "signal":
            running.process.terminate()
        else:
            await ask_another(running.process, crowd)
        await running.line("drain_begun")
        for channel in crowd.channels:
            await until_said(channel, "DRAINING")
        (tmp_path / "end").touch()
        for stream in streams:
            assert (await ended(stream)).HasField("finished")
        assert await running.code() == 0
        assert not any(exists(pid) for pid in others)
        assert not list(blob_folder().glob(f"legato-{running.process.pid}-*"))


async def test_an_abort_reaches_every_process():
    """Naming a request, or all, stops it whichever process has it, and counts it."""
    async with crowded() as (_, _, crowd):
        admin = admin_pb2_grpc.AdminServiceStub(crowd.channels[0])
        streams = await crowd.begin("wait")
        one = stub(crowd.channels[1]).Generate(ask("wait", "one"))
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


async def ask_another(first, crowd):
    """Have a process that is not the first asked to drain: the one that answers meanwhile."""
    first.send_signal(signal.SIGSTOP)
    calls = [
        admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest())
        for channel in crowd.channels
    ]
    await asyncio.wait(
        [asyncio.ensure_future(call.code()) for call in calls],
        return_when=asyncio.FIRST_COMPLETED,
    )
    assert [await call.code() for call in calls if call.done()][:1] == [grpc.StatusCode.OK]
    for call in calls:
        call.cancel()
    first.send_signal(signal.SIGCONT)


async def test_what_does_not_end_is_cut_everywhere():
    """The grace ends for all processes, and all leave."""
    async with crowded("--drain-grace", "0.3") as (running, _, crowd):
        streams = await crowd.begin("wait")
        others = children(running.process.pid)
        running.process.terminate()
        for stream in streams:
            assert (await ended(stream)).code is grpc.StatusCode.UNAVAILABLE
        assert await running.code() == 0
        assert not any(exists(pid) for pid in others)


@pytest.mark.parametrize(("first", "second"), [("1", "2"), ("2", "1"), ("2", "2")])
async def test_a_port_is_shared_within_a_server_only(first, second):
    """Another server on the same port is an error, however many processes either has."""
    async with service("--processes", first) as taken:
        address = (await taken.line("ready"))["address"]
        async with service("--processes", second, "--listen", address) as late:
            assert (await late.line("listen_failed"))["listen"] == address
            assert await late.code() == 1
