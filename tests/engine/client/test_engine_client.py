"""The engine client against a process that speaks the protocol without a model."""

import asyncio
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import structlog
import uvloop
from legato_engine.client import engine_client
from legato_engine.client.connection import EngineConnection
from legato_engine.client.engine_client import ChildProcess, EngineClient, EngineLimits
from legato_engine.client.monitor import EngineState, HangLimits
from legato_engine.client.request_stream import merge_events
from legato_engine.config import EngineConfig
from legato_engine.errors import (
    DeadlineExceeded,
    Draining,
    EngineLost,
    EngineStarting,
    ImageNotFound,
    ImageUndecodable,
    InvalidField,
)
from legato_engine.ipc.latency_policy import SHARED
from legato_engine.ipc.messages import Done, DropImage, HoldImage, OutputDelta, PrefillStarted
from legato_engine.ipc.service_connections import pending_connections
from legato_engine.shm import blob_folder
from legato_engine.types import (
    CachedImageRef,
    EncodedImage,
    FinishReason,
    QueryOutput,
    QuerySpec,
    Request,
    RequestKey,
    TextEvent,
)

FAKE = (sys.executable, "-m", "tests.engine.client.fake_engine")
pytestmark = pytest.mark.usefixtures("child_python_path")


@contextlib.asynccontextmanager
async def running(
    *, model: str = "fake", ready: bool = True, **limits: Any
) -> AsyncIterator[EngineClient]:
    """A started client that must end with nothing open."""
    config = EngineConfig(model=model, heartbeat_interval=0.02)
    client = EngineClient(
        config, limits=EngineLimits(**{"backoff_first": 0.05, **limits}), command=FAKE
    )
    await client.start()
    try:
        if ready:
            await client.wait_ready()
        yield client
    finally:
        await client.close()
        assert client.num_open == 0
        assert list(blob_folder().glob(f"{client.blobs.namespace}*")) == []


def request_to(question, name="r", image=None):
    """A request that tells the fake engine what to do."""
    return Request(request_id=RequestKey(name), task=QuerySpec(question=question), image=image)


def text_of(deltas):
    """The text of deltas."""
    return "".join(event.text for delta in deltas for event in delta.events)


def running_process(client: EngineClient) -> ChildProcess:
    """The engine process that is running now."""
    assert client._process is not None
    return client._process


async def until(condition):
    """Poll a condition without an event."""
    while not condition():  # noqa: ASYNC110 - the condition is another process's
        await asyncio.sleep(0.005)


async def test_result():
    """Outputs arrive in order and end with the result."""
    async with running() as client:
        assert client.model is not None
        assert client.model.name == "fake"
        reports = [r async for r in client.submit(request_to("echo"))]
        assert isinstance(reports[0], PrefillStarted)
        assert isinstance(reports[-1], Done)
        events = [e for r in reports if isinstance(r, OutputDelta) for e in r.events]
        assert merge_events(events) == (TextEvent(text="abc"),)
        assert client.num_open == 0


async def test_heartbeats_are_seen():
    """Step, load and estimate are those of the last heartbeat."""
    async with running() as client:
        stream = client.submit(request_to("hang"))
        await until(lambda: client.load.running == 1)
        assert client.step > 0
        assert client.estimated_wait == 0.5
        stream.abort()
        await until(lambda: client.load.running == 0)


async def test_failure_of_one_request():
    """A failed request raises its own error, and the engine serves on."""
    async with running() as client:
        stream = client.submit(request_to("bad"))
        with pytest.raises(ImageUndecodable):
            [r async for r in stream]
        assert isinstance([r async for r in client.submit(request_to("echo", "r2"))][-1], Done)


async def test_refused_before_ready():
    """A request before the engine is ready raises EngineStarting."""
    async with running(ready=False) as client:
        with pytest.raises(EngineStarting):
            client.submit(request_to("echo"))


async def test_same_id_twice():
    """A second request with an open id is refused; the first one is untouched."""
    async with running() as client:
        first = client.submit(request_to("slow"))
        with pytest.raises(InvalidField):
            client.submit(request_to("echo"))
        assert isinstance(await anext(first), PrefillStarted)


@pytest.mark.parametrize("how", ["die", "kill"])
async def test_streams_go_on_with_the_next_engine(how):
    """A stream pauses and goes on where it was; nothing is told twice or lost."""
    async with running() as client:
        states: list[EngineState] = []
        client.subscribe(states.append)
        streams = [client.submit(request_to("pause", f"s{i}")) for i in range(5)]
        first = [[await anext(stream), await anext(stream)] for stream in streams]
        if how == "kill":
            os.killpg(running_process(client).pid, signal.SIGKILL)
        else:
            client.submit(request_to("die once"))
        await until(lambda: EngineState.LOST in states)
        with pytest.raises(EngineLost):
            client.submit(request_to("echo", "while-lost"))
        for stream, begun in zip(streams, first, strict=True):
            outputs = begun + [each async for each in stream]
            assert isinstance(outputs[0], PrefillStarted)
            assert text_of(outputs[1:-1]) == "abc"
            done = outputs[-1]
            assert isinstance(done, Done)
            assert done.resumptions == 1
        assert states == [EngineState.LOST, EngineState.STARTING, EngineState.READY]
        assert client.restarts == 1
        last = [each async for each in client.submit(request_to("echo", "after"))][-1]
        assert isinstance(last, Done)
        assert last.resumptions == 0


async def test_a_unary_request_runs_again():
    """Without deltas nothing was told, so that it begins anew with the next engine."""
    async with running() as client:
        request = msgspec.structs.replace(request_to("die once"), deltas=False, progress=False)
        done = await client.submit(request).done()
        assert done.result == QueryOutput(answer="abc")
        assert done.resumptions == 1


async def test_a_request_outlives_three_engines():
    """The fourth loss ends it with EngineLost."""
    async with running(backoff_cap=0.05) as client:
        stream = client.submit(request_to("die"))
        with pytest.raises(EngineLost):
            [each async for each in stream]
        assert client.recovery.num_resumptions == 3


async def test_no_engine_can_come():
    """When none can serve, open requests end with EngineLost."""
    async with running() as client:
        waiting = client.submit(request_to("pause", "other"))
        client.submit(request_to("die as unservable"))
        with pytest.raises(EngineLost):
            [each async for each in waiting]
        assert client.unservable


async def test_ends_without_an_engine():
    """Meanwhile a request can be aborted; a stop waits for the engine; a deadline's abort works."""
    async with running() as client:
        aborted, stopped, late = (client.submit(request_to("slow", name)) for name in "abc")
        running_process(client).kill()
        await until(lambda: client.state is EngineState.LOST)
        aborted.abort()
        stopped.stop()
        late.abort(DeadlineExceeded("late"))
        assert [each async for each in aborted] == []
        with pytest.raises(DeadlineExceeded):
            [each async for each in late]
        done = await stopped.done()
        assert done.finish_reason is FinishReason.CANCELLED
        assert done.resumptions == 1


async def test_a_drain_without_an_engine():
    """Requests that wait for an engine end with Draining, because none is started."""
    async with running() as client:
        stream = client.submit(request_to("pause"))
        await anext(stream)
        running_process(client).kill()
        await until(lambda: client.state is EngineState.LOST)
        client.drain()
        with pytest.raises(Draining):
            [each async for each in stream]


async def test_a_request_may_wait_for_an_engine():
    """A call that has begun submits while there is none; that is no resumption."""
    async with running() as client:
        running_process(client).kill()
        await until(lambda: client.state is EngineState.LOST)
        stream = client.submit(request_to("echo"), may_wait=True)
        done = await stream.done()
        assert (done.result, done.resumptions) == (QueryOutput(answer="abc"), 0)
        assert client.recovery.num_resumptions == 0


@pytest.mark.parametrize("size", [7, 5_000_000], ids=["segment", "file"])
async def test_an_image_is_staged_for_each_engine(size):
    """Its blob is gone with the engine that took it; without its bytes the request ends."""
    async with running() as client:

        def stage(blobs=client.blobs):
            blob = blobs.put(b"x" * size)
            return [EncodedImage(blob=blob, mime_type="image/png")]

        (image,), (other,) = stage(), stage()
        stream = client.submit(request_to("pause", image=image), stage)
        unable = client.submit(request_to("pause", "unable", image=other))
        for each in (stream, unable):
            assert isinstance(await anext(each), PrefillStarted)
        running_process(client).kill()
        done = await stream.done()
        assert done.resumptions == 1
        with pytest.raises(EngineLost):
            [each async for each in unable]
        assert len(client.blobs) == 0


async def test_an_engine_without_a_named_image_gets_its_bytes():
    """A request that names an image ends with ImageNotFound only if its bytes are not there."""
    async with running() as client:

        def stage(blobs):
            return [EncodedImage(blob=blobs.put(b"bytes"), mime_type="image/png")]

        named = CachedImageRef(image_id="img_1")
        done = await client.submit(request_to("echo", image=named), stage).done()
        assert (done.result, done.resumptions) == (QueryOutput(answer="abc"), 0)
        with pytest.raises(ImageNotFound):
            await client.submit(request_to("echo", image=named)).done()
        assert len(client.blobs) == 0


async def test_engine_that_never_starts():
    """It is restarted again and again, and requests are refused."""
    async with running(model="broken", ready=False, backoff_cap=0.05) as client:
        await until(lambda: client.restarts >= 3)
        with pytest.raises((EngineLost, EngineStarting)):
            client.submit(request_to("echo"))
        waiting = list(pending_connections(client._listeners._sockets[0]))
        assert len(waiting) <= 2, "links to engines that never came do not pile up"
        for each in waiting:
            each.close()


async def test_a_loading_engine_may_be_silent_for_longer():
    """Until it is ready, the limit `loading` holds; after that it is replaced, too."""
    async with running(model="heavy", silence=0.5) as client:
        assert client.restarts == 0
    async with running(model="heavy", ready=False, loading=0.5) as client:
        await until(lambda: client.restarts >= 1)


async def test_a_loading_engine_that_reads_files_is_not_killed():
    """A slow disk is no hang, however long it takes."""
    async with running(model="reader", loading=0.5) as client:
        assert client.restarts == 0


async def test_frozen_engine_is_replaced():
    """An engine without heartbeats is killed and restarted."""
    async with running(silence=0.5) as client:
        done = await client.submit(request_to("freeze once")).done()
        assert done.resumptions == 1
        assert client.restarts == 1


async def test_an_engine_that_does_not_step_is_replaced():
    """Heartbeats alone do not keep an engine with work alive."""
    async with running(stuck=0.5, hang=HangLimits(stuck=0.3)) as client:
        states: list[EngineState] = []
        client.subscribe(states.append)
        stream = client.submit(request_to("stick", "stick"))
        with pytest.raises(EngineLost):
            [r async for r in stream]
        await client.wait_ready()
        assert states[:2] == [EngineState.HUNG, EngineState.LOST]


async def test_stopped_engine_is_replaced():
    """An engine that a signal stopped is killed and restarted."""
    async with running(silence=0.5) as client:
        os.kill(running_process(client).pid, signal.SIGSTOP)
        await until(lambda: client.restarts >= 1)
        await client.wait_ready()


async def test_a_stopped_engine_gets_no_request_and_serves_on_when_it_continues():
    """It is neither replaced nor asked before its next heartbeat."""
    async with running(hang=HangLimits(silence=0.5)) as client:
        pid = running_process(client).pid
        states: list[EngineState] = []
        client.subscribe(states.append)
        held = client.submit(request_to("slow"))
        assert isinstance(await anext(held), PrefillStarted)
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: client.state is EngineState.HUNG)
        with pytest.raises(EngineLost, match="does not respond"):
            client.submit(request_to("echo", "refused"))
        waiting = client.submit(request_to("echo", "waits"), may_wait=True)
        os.kill(pid, signal.SIGCONT)
        await until(lambda: client.state is EngineState.READY)
        assert (await waiting.done()).resumptions == 0
        assert isinstance([r async for r in client.submit(request_to("echo", "r2"))][-1], Done)
        assert isinstance(await anext(held), OutputDelta)
        held.abort()
        assert states == [EngineState.HUNG, EngineState.READY]
        assert (client.restarts, running_process(client).pid) == (0, pid)


async def test_a_pause_of_this_process_is_not_the_engines():
    """An event loop that did not turn for longer than every limit kills no engine."""
    async with running(hang=HangLimits(silence=2.0), silence=2.0) as client:
        pid = running_process(client).pid
        states: list[EngineState] = []
        client.subscribe(states.append)
        time.sleep(4.5)  # noqa: ASYNC251 - the pause
        await asyncio.sleep(0.1)
        assert (states, client.restarts, running_process(client).pid) == ([], 0, pid)


async def restart_delays(client, num_deaths, before_death):
    """The delays before the restarts of an engine that is killed whenever it is ready."""
    with structlog.testing.capture_logs() as lines:
        for number in range(num_deaths):
            await client.wait_ready()
            await before_death(number)
            before = client.restarts
            running_process(client).kill()
            await until(lambda: client.restarts > before)  # noqa: B023 - awaited at once
        await client.wait_ready()
    return [line["restart_in"] for line in lines if line["event"] == "engine_lost"]


async def test_an_engine_that_served_is_restarted_at_once():
    """One answered request is enough, however often it dies."""
    async with running() as client:

        async def answer(number):
            await client.submit(request_to("echo", f"r{number}")).done()

        assert await restart_delays(client, 8, answer) == [0] * 8


async def test_an_engine_that_dies_of_each_first_request_is_restarted_later():
    """Else it would take up the machine: it has not served."""
    async with running(backoff_first=0.01, backoff_ready_cap=0.04) as client:

        async def die(number):
            with pytest.raises(EngineLost):
                await client.submit(request_to("die", f"r{number}")).done()

        async def nothing(_):
            pass

        with structlog.testing.capture_logs() as lines:
            for number in range(2):
                await client.wait_ready()
                await die(number)
            await client.wait_ready()
        delays = [line["restart_in"] for line in lines if line["event"] == "engine_lost"]
        assert delays[:3] == [0.01, 0.02, 0.04]
        assert set(delays[3:]) == {0.04}
        assert await restart_delays(client, 2, nothing) == [0.04, 0.04]


async def test_abort_races():
    """Aborting at any moment leaves nothing open and disturbs no other stream."""
    async with running() as client:
        streams = [client.submit(request_to("slow", f"s{i}")) for i in range(200)]
        for i, stream in enumerate(streams):
            if i % 3 == 0:
                await asyncio.sleep(0)
            stream.abort()
        again = [client.submit(request_to("echo", f"s{i}")) for i in range(200)]
        for stream in again:
            assert isinstance([r async for r in stream][-1], Done)
        assert client.num_open == 0


async def test_a_stopped_request_has_a_partial_result():
    """The engine ends the request, and `Done` says CANCELLED."""
    async with running() as client:
        stream = client.submit(request_to("slow"))
        assert isinstance(await anext(stream), PrefillStarted)
        stream.stop()
        last = await stream.done()
        assert last.finish_reason is FinishReason.CANCELLED
        assert client.num_open == 0


async def test_a_blob_ends_with_its_request():
    """It is unlinked when its request ends, is refused, or the engine dies."""
    async with running() as client:

        def picture():
            return EncodedImage(blob=client.blobs.put(b"picture"), mime_type="image/png")

        [r async for r in client.submit(request_to("echo", image=picture()))]
        assert len(client.blobs) == 0
        with contextlib.suppress(EngineLost):
            [r async for r in client.submit(request_to("die", image=picture()))]
        with pytest.raises((EngineLost, EngineStarting)):
            client.submit(request_to("echo", image=picture()))
        assert len(client.blobs) == 0
        assert list(blob_folder().glob(f"{client.blobs.namespace}*")) == []


def hold(client, data, name="h"):
    """A command to hold an image of these bytes."""
    image = EncodedImage(blob=client.blobs.put(data), mime_type="image/png")
    return HoldImage(request_id=RequestKey(name), image=image, owner="me", ttl=5.0)


def drop(image_id, name="d"):
    """A command to drop an image."""
    return DropImage(request_id=RequestKey(name), image_id=image_id, owner="me")


async def test_an_image_is_held_and_dropped():
    """Each command has one reply or raises; no blob stays."""
    async with running() as client:
        held = await client.hold(hold(client, b"img"))
        assert (held.image.image_id, held.until) == ("img", 5.0)
        with pytest.raises(ImageUndecodable):
            await client.hold(hold(client, b"bad"))
        await client.drop(drop("img"))
        with pytest.raises(ImageNotFound):
            await client.drop(drop("img"))
        assert len(client.blobs) == 0


async def test_a_hold_is_lost_with_its_engine():
    """A dying engine fails its pending commands, and its successor holds nothing."""
    async with running() as client:
        waiting = asyncio.create_task(client.hold(hold(client, b"hang", "h1")))
        await asyncio.sleep(0)
        with pytest.raises(EngineLost):
            await client.hold(hold(client, b"die", "h2"))
        with pytest.raises(EngineLost):
            await waiting
        with pytest.raises((EngineLost, EngineStarting)):
            await client.hold(hold(client, b"img"))
        with pytest.raises((EngineLost, EngineStarting)):
            await client.drop(drop("img"))
        assert len(client.blobs) == 0
        await client.wait_ready()
        with pytest.raises(ImageNotFound):
            await client.drop(drop("img"))


async def test_a_cancelled_hold_leaves_nothing():
    """Cancelling while an image is prepared leaves no blob and no pending command."""
    async with running() as client:
        command = hold(client, b"hang")
        waiting = asyncio.create_task(client.hold(command))
        await until(lambda: not (blob_folder() / command.image.blob.name).exists())
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert len(client.blobs) == 0
        assert len(client._commands) == 0
        assert (await client.hold(hold(client, b"img"))).image.image_id == "img"


async def test_drain():
    """While draining, open requests finish, new ones are refused, lost engines stay down."""
    async with running() as client:
        stream = client.submit(request_to("slow"))
        client.drain()
        with pytest.raises(Draining):
            client.submit(request_to("echo", "late"))
        assert isinstance(await anext(stream), PrefillStarted)
        delta = await anext(stream)
        assert isinstance(delta, OutputDelta)
        assert isinstance(delta.events[0], TextEvent)
        running_process(client).kill()
        with pytest.raises(EngineLost):
            [r async for r in stream]
        assert client._supervision is not None
        await asyncio.wait_for(client._supervision, 5)
        assert client.state is EngineState.DRAINING


async def test_close_fails_open_streams():
    """They fail with Draining, and no process is left."""
    async with running() as client:
        stream = client.submit(request_to("hang"))
        pid = running_process(client).pid
        await client.close()
        await client.close()
        with pytest.raises(Draining):
            [r async for r in stream]
        assert client.state is EngineState.STOPPED
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_an_engine_that_loads_is_ended_at_once(monkeypatch):
    """It may not read yet that it shall end, and has nothing to finish."""
    monkeypatch.setattr(engine_client, "_SHUTDOWN_GRACE", math.inf)
    loading = (sys.executable, "-c", "import time; time.sleep(86_400)")
    client = EngineClient(EngineConfig(model="fake"), command=loading)
    await client.start()
    await until(lambda: client._process is not None)
    process = running_process(client)
    await client.close()
    await process.wait()
    assert client.state is EngineState.STOPPED


def test_uvloop():
    """The client runs on uvloop, through a crash and back."""

    async def scenario():
        async with running() as client:
            with contextlib.suppress(EngineLost):
                [r async for r in client.submit(request_to("die"))]
            await client.wait_ready()
            reports = [r async for r in client.submit(request_to("echo"))]
            assert isinstance(reports[-1], Done)

    uvloop.run(scenario())


@contextlib.asynccontextmanager
async def worker_connection(client, number=1):
    """Another service process's connection to a client's engine, in this process."""
    connection = EngineConnection(f"{client.blobs.namespace}-{number}", SHARED, number)
    connection.connect(client.endpoint)
    try:
        await connection.wait_ready()
        yield connection
    finally:
        await connection.close()
        assert connection.num_open == 0
        assert list(blob_folder().glob(f"{connection.blobs.namespace}*")) == []


async def test_segments_are_reused_for_one_engine():
    """It takes one image after another in the same segment; a new engine gets new ones."""
    async with running() as client:
        names = []
        for question in ("echo", "echo", "die", "echo", "echo"):
            image = EncodedImage(blob=client.blobs.put(b"picture"), mime_type="image/png")
            names.append(image.blob.name)
            with contextlib.suppress(EngineLost):
                [r async for r in client.submit(request_to(question, image=image))]
            await client.wait_ready()
        assert [name == names[0] for name in names] == [True, True, True, False, False]
        assert names[3] == names[4]


async def test_two_processes_may_use_one_id():
    """The same id in two service processes is two requests with outputs of their own."""
    async with running() as client, worker_connection(client) as other:
        assert other.model == client.model
        image = EncodedImage(blob=other.blobs.put(b"picture"), mime_type="image/png")
        first, second = (
            client.submit(request_to("slow")),
            other.submit(request_to("echo", image=image)),
        )
        assert isinstance([r async for r in second][-1], Done)
        first.stop()
        assert (await first.done()).finish_reason is FinishReason.CANCELLED


async def test_stopping_elsewhere():
    """`stop_elsewhere` stops and counts only other processes' requests."""
    async with running() as client, worker_connection(client) as other:
        own, another = (
            [each.submit(request_to("slow", n)) for n in "abc"] for each in (client, other)
        )
        for stream in another:
            assert isinstance(await anext(stream), PrefillStarted)
        assert await client.stop_elsewhere(RequestKey("a")) == 1
        assert (await another[0].done()).finish_reason is FinishReason.CANCELLED
        assert await client.stop_elsewhere(RequestKey("a")) == 0
        assert await client.stop_elsewhere() == 2
        for stream in another[1:]:
            assert (await stream.done()).finish_reason is FinishReason.CANCELLED
        assert not any(stream.ended for stream in own)
        for stream in own:
            stream.abort()


async def test_all_connections_lose_a_dead_engine():
    """The open requests of each go on with the next engine."""
    async with running() as client, worker_connection(client) as other:
        states: list[EngineState] = []
        other.subscribe(states.append)
        streams = [each.submit(request_to("pause")) for each in (client, other)]
        for stream in streams:
            await anext(stream)
        running_process(client).kill()
        await until(lambda: other.state is EngineState.LOST)
        with pytest.raises((EngineLost, EngineStarting)):
            await other.stop_elsewhere()
        for each, stream in zip((client, other), streams, strict=True):
            await each.wait_ready()
            assert text_of([r async for r in stream][:-1]) == "abc"
            assert isinstance([r async for r in each.submit(request_to("echo"))][-1], Done)
        assert states[0] is EngineState.LOST
        assert states[-1] is EngineState.READY


async def test_a_pending_stop_fails_with_the_engine():
    """`stop_elsewhere` without a reply raises EngineLost."""
    async with running() as client:
        os.kill(running_process(client).pid, signal.SIGSTOP)
        asking = asyncio.create_task(client.stop_elsewhere())
        await asyncio.sleep(0)
        running_process(client).kill()
        with pytest.raises(EngineLost):
            await asking
