"""A service process's transport, against the engine's end."""

import asyncio

import pytest
from legato_engine.ipc import service_connections, transport
from legato_engine.ipc.messages import Abort, Heartbeat, Load, Queued
from legato_engine.ipc.transport import EngineTransport
from legato_engine.types import RequestKey

from tests.engine.ipc.both_ends import both_ends, done, loading, submit, until


async def test_commands_wait_for_the_engine():
    """Commands that were sent before the engine reads arrive in order."""
    with both_ends() as ends:
        service = ends.connect()
        service.submit("a", "b")
        assert await ends.received(2) == [submit("a"), submit("b")]
        service.submit("c")
        assert await ends.received() == [submit("c")]


async def test_a_command_sent_at_once_follows_earlier_ones():
    """It arrives before the turn of the loop ends, after all earlier commands."""
    with both_ends() as ends:
        service = ends.connect()
        service.submit("a")
        ends.engine.receive()  # accepts the connection
        service.transport.send(submit("b"), at_once=True)
        ends.engine.wait(1000)
        assert ends.engine.receive() == [submit("a"), submit("b")]
        service.submit("c")
        assert await ends.received() == [submit("c")]


async def test_a_backlog_of_commands_is_sent_when_there_is_room():
    """Commands that the socket did not take are sent once the engine reads again."""
    with both_ends() as ends:
        service = ends.connect()
        names = [str(i) * 50_000 for i in range(10)]
        service.submit(*names)
        received: list[object] = []
        while len(received) < len(names):
            received += ends.engine.receive()
            await asyncio.sleep(0)
        assert received == [submit(name) for name in names]


async def test_closing_delivers_what_has_arrived():
    """Closing delivers the last messages, and does not call `on_end`."""
    with both_ends() as ends:
        service = ends.connect()
        service.submit("a")
        await ends.received()
        ends.engine.send(done("a"))
        ends.engine.close(0)
        service.transport.close()
        assert service.messages == [done("a")]
        assert service.ends == 0


async def test_the_end_is_reported_once_after_the_last_message():
    """`on_end` is called once, after all messages were delivered."""
    with both_ends() as ends:
        service = ends.connect()
        service.submit("a")
        await ends.received()
        ends.engine.post(Queued(request_id=RequestKey("a"), position=0, estimated_wait=0.0))
        ends.engine.post(done("a", size=1_000_000))
        received_at_end: list[int] = []
        service.transport._on_end = lambda: received_at_end.append(len(service.messages))
        closing = asyncio.create_task(asyncio.to_thread(ends.engine.close, 60_000))
        await until(lambda: received_at_end)
        await closing
        service.transport.send(Abort(request_id=RequestKey("a")))
        await asyncio.sleep(0)
        assert received_at_end == [2]


async def test_a_connection_between_two_engines_waits_for_the_next():
    """The next engine accepts a connection that was made while there was none."""
    with both_ends() as ends:
        ends.engine.close(0)
        service = ends.connect()
        service.submit("a")
        ends.engine = type(ends.engine)(ends.listeners.filenos[0], ends.wake)
        ends.engine.broadcast(loading())
        assert await ends.received() == [submit("a")]
        assert await service.received(1) == [loading()]


async def test_heartbeats_reach_all_connections():
    """A later connection receives the next heartbeat."""
    beats = [Heartbeat(step=i, load=Load(), estimated_wait=0.0) for i in range(2)]
    with both_ends() as ends:
        first = ends.connect()
        ends.subscribers.send(beats[0])
        second = ends.connect()
        ends.subscribers.send(beats[1])
        assert await first.received(2) == beats
        assert await second.received(1) == beats[1:]


async def test_a_closed_subscriber_is_dropped():
    """A heartbeat to a closed connection raises nothing and closes its socket."""
    beat = Heartbeat(step=1, load=Load(), estimated_wait=0.0)
    with both_ends() as ends:
        service = ends.connect()
        ends.subscribers.send(beat)
        service.transport.close()
        ends.subscribers.send(beat)
        assert not ends.subscribers._connections


async def test_a_rejected_connection_sees_its_end():
    """Without an engine, pending connections are closed and none is left."""
    with both_ends() as ends:
        services = [ends.connect() for _ in range(3)]
        services[0].transport.close()
        ends.listeners.reject_pending()
        await until(lambda: [service.ends for service in services] == [0, 1, 1])
        ends.engine.broadcast(loading())
        assert len(ends.engine) == 0


async def test_a_process_is_not_half_rejected(monkeypatch):
    """A process that connects meanwhile keeps both of its connections, or sees an end."""
    with both_ends() as ends:
        connects = iter((ends.connect, int))

        def pending_connections_late(listener):
            yield from service_connections.pending_connections(listener)
            next(connects)()

        monkeypatch.setattr(transport, "pending_connections", pending_connections_late)
        ends.listeners.reject_pending()
        beat = Heartbeat(step=1, load=Load(), estimated_wait=0.0)
        ends.subscribers.send(beat)
        (service,) = ends.services
        await until(lambda: service.ends or service.messages)
        assert service.ends or service.messages == [beat]


async def test_connecting_without_listening_sockets():
    """It raises OSError."""
    with both_ends() as ends:
        ends.listeners.close()
        with pytest.raises(OSError, match="No such file"):
            EngineTransport(ends.listeners.endpoint, print, print)
