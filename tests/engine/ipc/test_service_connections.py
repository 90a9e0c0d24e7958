"""Connections of several service processes to one engine."""

import asyncio
import os
import select
from typing import cast

import msgspec
import pytest
from legato_engine.client.connection import EngineConnection
from legato_engine.client.monitor import EngineState
from legato_engine.ipc.latency_policy import LOW_LATENCY, SHARED
from legato_engine.ipc.messages import (
    Abort,
    DropImage,
    Expect,
    Failed,
    ImageDropped,
    QueuePosition,
    Shutdown,
    Stop,
    StopElsewhere,
    StoppedCalls,
    Submit,
    TimelineBatch,
    WatchTimeline,
)
from legato_engine.types import BlobRef, CaptionSpec, EncodedImage, Request, RequestKey

from tests.engine.ipc.both_ends import as_key, both_ends, done, loading, submit, until

A1, B1, C1, Z1 = (RequestKey(name, worker=1) for name in "abcz")


class Poller:
    """An epoll that reports an event at poll number `polls`, and records the timeouts."""

    def __init__(self, polls: int) -> None:
        self.slept: list[float | None] = []
        self._polls = polls

    def poll(self, seconds: float | None, _: int) -> list[tuple[int, int]]:
        """Record the timeout."""
        self.slept.append(seconds)
        return [(0, 0)] if len(self.slept) == self._polls else []


@pytest.fixture
def polls_for_long(monkeypatch):
    """Busy polling ends by events, however slow the machine is."""
    for name in ("EXPECTED_REQUEST", "SHORT_REQUEST"):
        monkeypatch.setattr(f"legato_engine.client.connection.{name}", 3600.0)


def connected(ends, policy=LOW_LATENCY, state=EngineState.READY):
    """The connection of a service process to the engine."""
    connection = EngineConnection("legato-test", policy)
    connection.connect(ends.listeners.endpoint)
    connection.state = state
    return connection


def queued(name):
    """An output that is not the last."""
    return QueuePosition(request_id=as_key(name), position=0, estimated_wait=0.0)


async def test_an_output_goes_to_the_process_that_submitted():
    """Each service process receives the outputs of its own requests only."""
    with both_ends() as ends:
        first, second = ends.connect(), ends.connect()
        first.submit("a")
        second.submit(A1)
        await ends.received(2)
        for name in ("a", A1):
            ends.engine.post(queued(name))
            ends.engine.send(done(name))
        assert await first.received(2) == [queued("a"), done("a")]
        assert await second.received(2) == [queued(A1), done(A1)]


async def test_the_status_reaches_all_processes():
    """Connected processes receive every status; later ones receive the latest once."""
    with both_ends() as ends:
        first = ends.connect()
        ends.engine.broadcast(loading(1))
        second = ends.connect()
        ends.engine.broadcast(loading(2))
        third = ends.connect()
        third.submit("a")
        await ends.received()
        assert await first.received(2) == [loading(1), loading(2)]
        assert await second.received(1) == [loading(2)]
        assert await third.received(1) == [loading(2)]


async def test_a_disconnected_process_leaves_nothing():
    """Its open requests are aborted; those of the others continue."""
    with both_ends() as ends:
        first, second = ends.connect(), ends.connect()
        first.submit("a")
        second.submit(A1, B1, C1)
        await ends.received(4)
        ends.engine.send(done(C1))
        second.transport.close()
        assert {each.request_id for each in await ends.received(2)} == {A1, B1}
        assert len(ends.engine) == 1
        ends.engine.send(done(A1))
        ends.engine.send(done("a"))
        assert await first.received(1) == [done("a")]


async def test_a_disconnect_reports_the_namespace_of_blobs():
    """Only for a process that disconnected and had sent blobs."""
    with both_ends() as ends:
        services = [ends.connect() for _ in range(3)]
        for number, service in enumerate(services[:2]):
            image = EncodedImage(blob=BlobRef(name=f"ns-{number}-abc", size=1), mime_type="")
            request = Request(request_id=RequestKey(f"{number}"), task=CaptionSpec(), image=image)
            service.transport.send(Submit(request=request))
        await ends.received(2)
        services[1].transport.close()
        services[2].transport.close()
        await ends.received(1)
        ends.engine.wait(100)
        ends.engine.receive()
        assert len(ends.engine) == 1
        assert ends.disconnected == ["ns-1"]


async def test_a_disconnect_comes_before_newer_commands():
    """Requests of a dead process are aborted before its successor uses the same ids."""
    with both_ends() as ends:
        first = ends.connect()
        second = ends.connect()
        second.submit(A1)
        await ends.received()
        third = ends.connect()
        first.submit("b")
        third.submit(Z1)
        assert len(await ends.received(2)) == 2
        first.submit("c")
        third.submit(A1)
        second.transport.close()
        commands = await ends.received(3)
        assert commands[0] == Abort(request_id=A1)
        assert submit("c") in commands


async def test_a_process_cannot_use_the_id_of_another():
    """An open id is refused, and `Abort` and `Stop` of another's id are dropped."""
    with both_ends() as ends:
        first, second = ends.connect(), ends.connect()
        first.submit("a")
        await ends.received()
        second.submit("a", "b")
        second.transport.send(Abort(request_id=RequestKey("a")))
        second.transport.send(Stop(request_id=RequestKey("a")))
        second.transport.send(Stop(request_id=RequestKey("b")))
        assert await ends.received(2) == [submit("b"), Stop(request_id=RequestKey("b"))]
        ends.engine.flush()
        (failed,) = await second.received(1)
        assert isinstance(failed, Failed)
        assert failed.request_id == RequestKey("a")
        ends.engine.send(done("a"))
        assert await first.received(1) == [done("a")]


async def test_image_replies_go_to_the_process_that_asked():
    """`HoldImage` and `DropImage` are forgotten when that process disconnects."""
    with both_ends() as ends:
        first, second = ends.connect(), ends.connect()
        drops = [DropImage(request_id=n, image_id="img_1", owner="me") for n in (A1, B1)]
        for drop in drops:
            second.transport.send(drop)
        assert await ends.received(2) == drops
        ends.engine.send(ImageDropped(request_id=A1))
        assert await second.received(1) == [ImageDropped(request_id=A1)]
        second.transport.close()
        assert await ends.received() == [Abort(request_id=B1)]
        assert first.messages == []


async def test_an_aborted_request_has_no_further_output():
    """Later outputs are dropped, and the id is free again."""
    with both_ends() as ends:
        service = ends.connect()
        service.submit("a")
        service.transport.send(Abort(request_id=RequestKey("a")))
        service.submit("a")
        assert await ends.received(3) == [
            submit("a"),
            Abort(request_id=RequestKey("a")),
            submit("a"),
        ]
        service.transport.send(Abort(request_id=RequestKey("a")))
        await ends.received()
        ends.engine.send(done("a"))
        service.submit("b")
        await ends.received()
        ends.engine.send(done("b"))
        assert await service.received(1) == [done("b")]


async def test_stopping_requests_of_other_processes():
    """`StopElsewhere` stops an id of one tenant or of any; the tasks of a call count once."""
    with both_ends() as ends:
        first, second = ends.connect(), ends.connect()
        tasks = [RequestKey("a", part=part) for part in "01"]
        of_shop = RequestKey("a", "shop")
        first.submit(*tasks, of_shop, "b")
        second.submit(A1, C1)
        drop = DropImage(request_id=RequestKey("drop", worker=1), image_id="img_1", owner="me")
        second.transport.send(drop)
        await ends.received(7)

        async def stopped(service, call, target, count):
            service.transport.send(StopElsewhere(request_id=RequestKey(call), target=target))
            stops = await ends.received(count)
            assert all(isinstance(each, Stop) for each in stops)
            return {each.request_id for each in stops}

        assert await stopped(second, "7", RequestKey("a"), 3) == {*tasks, of_shop}
        assert await stopped(second, "8", of_shop, 1) == {of_shop}
        assert await stopped(first, "9", None, 2) == {A1, C1}
        ends.engine.flush()
        assert await second.received(2) == [
            StoppedCalls(request_id=RequestKey("7"), count=2),
            StoppedCalls(request_id=RequestKey("8"), count=1),
        ]
        assert await first.received(1) == [StoppedCalls(request_id=RequestKey("9"), count=2)]


async def test_a_backlog_of_outputs_is_sent_in_order():
    """A sender never blocks; what the socket did not take is sent when it has room."""
    with both_ends() as ends:
        service = ends.connect()
        names = [str(i) for i in range(20)]
        service.submit(*names)
        await ends.received(len(names))
        sent = [done(name, size=100_000) for name in names]
        for report in sent:
            ends.engine.send(report)
        while len(service.messages) < len(sent):
            ends.engine.receive()
            await asyncio.sleep(0)
        assert service.messages == sent


async def test_room_for_unsent_outputs_wakes_the_engine():
    """An engine that sleeps with unsent outputs wakes once the service has read some."""
    with both_ends() as ends:
        service = ends.connect()
        service.submit("a")
        await ends.received()
        ends.engine.send(done("a", size=3_000_000))

        def sleep_and_send():
            while any(each.is_full for each in ends.engine._connections.values()):
                ends.engine.wait(None)
                ends.engine.receive()

        await asyncio.to_thread(sleep_and_send)  # the loop reads meanwhile, which makes room
        assert await service.received(1) == [done("a", size=3_000_000)]


async def test_posted_outputs_are_sent_by_the_flush():
    """They are not sent before it."""
    with both_ends() as ends:
        service = ends.connect()
        service.submit("a")
        await ends.received()
        ends.engine.post(queued("a"))
        await asyncio.sleep(0.01)
        assert service.messages == []
        ends.engine.flush()
        assert await service.received(1) == [queued("a")]


async def test_an_engine_without_connections_sleeps():
    """After all have disconnected, only its descriptor wakes it, once."""
    with both_ends() as ends:
        service = ends.connect()
        service.transport.send(Shutdown())
        service.transport.close()
        assert await ends.received() == [Shutdown()]
        os.eventfd_write(ends.wake, 1)
        ends.engine.wait(None)
        assert ends.engine.receive() == []
        ends.engine.wait(0)
        assert ends.engine.receive() == []
        assert len(ends.engine) == 0


async def test_closing_sends_the_backlog():
    """Within the time to linger, all outputs are sent."""
    with both_ends() as ends:
        service = ends.connect()
        service.submit("a")
        await ends.received()
        ends.engine.send(done("a", size=3_000_000))
        closing = asyncio.create_task(asyncio.to_thread(ends.engine.close, 60_000))
        assert await service.received(1) == [done("a", size=3_000_000)]
        await closing
        await until(lambda: service.ends == 1)


@pytest.mark.parametrize("policy", [SHARED, LOW_LATENCY])
async def test_requests_of_one_turn_are_sent_together(policy):
    """A lone one is sent at once; with low latency also those whose progress is not read."""
    with both_ends() as ends:
        connection = connected(ends, policy)
        for name in ("a", "b", "c"):
            request = msgspec.structs.replace(submit(name).request, progress=False)
            connection.submit(request)
        ends.engine.receive()  # accepts the connection
        ends.engine.wait(1000)
        came = [command.request.request_id.caller_id for command in ends.engine.receive()]
        assert came == (["a", "b", "c"] if policy.send_at_once else ["a"])
        if not policy.send_at_once:
            others = await ends.received(2)
            assert [each.request.request_id.caller_id for each in others] == ["b", "c"]
        await connection.close()


async def test_a_pause_is_cut_short_by_a_command():
    """It takes less than a millisecond, and `receive` returns what cut it short."""
    with both_ends() as ends:
        first = ends.connect()
        first.submit("a")
        await ends.received()
        assert not ends.engine.pause(1e-5)
        os.eventfd_write(ends.wake, 1)
        assert ends.engine.pause(3600.0)
        assert ends.engine.receive() == []
        assert not ends.engine.pause(0.0)
        first.submit("b")
        await asyncio.sleep(0)
        assert ends.engine.pause(3600.0)
        assert ends.engine.pause(3600.0)
        (command,) = ends.engine.receive()
        assert command.request.request_id == as_key("b")
        assert not ends.engine.pause(0.0)


async def test_an_engine_that_expects_a_request_polls():
    """`Expect` is no command of the engine core; the engine polls for a while."""
    with both_ends() as ends:
        service = ends.connect()
        service.submit("a")
        await ends.received()
        service.transport.send(Expect(), at_once=True)
        ends.engine.wait(1000)
        assert ends.engine.receive() == []
        real = ends.engine._poller
        for alert_until, slept in ((float("inf"), [0, 0, 0]), (0.0, [1.0])):
            poller = Poller(polls=len(slept))
            ends.engine._poller = cast("select.epoll", poller)
            assert ends.engine._poll_until > 0.0
            ends.engine._poll_until = alert_until
            ends.engine.wait(1000)
            assert poller.slept == slept
            ends.engine._events, ends.engine._poll_until = [], 1.0
        ends.engine._poller = real


@pytest.mark.parametrize("expects", [False, True])
async def test_an_engine_polls_after_the_last_result(expects):
    """Only if requests are announced, and not while others are open."""
    with both_ends() as ends:
        service = ends.connect()
        if expects:
            service.transport.send(Expect())
        service.submit("a", "b")
        await ends.received(2)
        assert bool(ends.engine._poll_until) == expects
        before = ends.engine._poll_until = float(expects)
        ends.engine.send(done("a"))
        assert ends.engine._poll_until == before
        ends.engine.send(done("b"))
        assert (ends.engine._poll_until > before) == expects


async def test_only_a_lone_request_is_announced():
    """The engine must be ready, and no other request open."""
    with both_ends() as ends:
        connection = connected(ends, state=EngineState.STARTING)
        connection.expect()
        connection.state = EngineState.READY
        connection.expect()
        connection.submit(submit("a").request)
        connection.expect()
        assert await ends.received() == [submit("a")]
        assert ends.engine._poll_until > 0.0
        await connection.close()


async def test_a_shared_engine_sleeps():
    """On few cores, polling would delay the request itself."""
    with both_ends() as ends:
        connection = connected(ends, SHARED)
        connection.expect()
        connection.submit(submit("a").request)
        assert await ends.received() == [submit("a")]
        assert ends.engine._poll_until == 0.0
        await connection.close()


@pytest.mark.usefixtures("polls_for_long")
async def test_a_loop_polls_until_a_lone_request_ends():
    """From its announcement to its end, unless another one is submitted."""
    with both_ends() as ends:
        connection = connected(ends)

        async def polls() -> bool:
            await asyncio.sleep(0)
            return connection._busy_poll.active

        connection.expect()
        assert await polls()
        connection.submit(submit("a").request)
        assert await polls()
        connection.submit(submit("b").request).abort()
        connection.submit(submit("c").request)
        assert not await polls()
        await connection.close()


@pytest.mark.usefixtures("polls_for_long")
@pytest.mark.parametrize("policy", [LOW_LATENCY, SHARED])
async def test_a_loop_polls_after_the_end_of_a_request(policy):
    """With low latency, until the time for that is over."""
    with both_ends() as ends:
        connection = connected(ends, policy)
        stream = connection.submit(submit("a").request)
        connection._busy_poll.end()
        await asyncio.sleep(0)
        assert not connection._busy_poll.active
        await ends.received()
        ends.engine.send(done("a"))
        await stream.done()
        await asyncio.sleep(0)
        assert connection._busy_poll.active == policy.busy_poll
        connection._busy_poll.end()
        await asyncio.sleep(0)
        assert not connection._busy_poll.active
        await connection.close()


@pytest.mark.usefixtures("polls_for_long")
async def test_a_loop_sleeps_while_other_requests_are_open():
    """The end of one of several requests does not start polling."""
    with both_ends() as ends:
        connection = connected(ends)
        ended, other = (connection.submit(submit(name).request) for name in "ab")
        await asyncio.sleep(0)
        ended.abort()
        await asyncio.sleep(0)
        assert not connection._busy_poll.active
        other.abort()
        await connection.close()


async def test_the_timeline_goes_to_the_processes_that_watch():
    """A batch reaches a process between its two `WatchTimeline`; one that leaves counts no more."""
    with both_ends() as ends:
        watching, other = ends.connect(), ends.connect()
        batch = TimelineBatch(spans=())
        assert not ends.engine.watched
        watching.transport.send(WatchTimeline(watching=True))
        while not ends.engine.watched:
            await asyncio.sleep(0)
            ends.engine.wait(10)
            assert ends.engine.receive() == []
        ends.engine.send_timeline(batch)
        await until(lambda: watching.messages == [batch])
        assert other.messages == []
        watching.transport.close()
        while ends.engine.watched:
            ends.engine.wait(10)
            ends.engine.receive()
