"""A service process's end of its link, against the engine's own."""

import asyncio

import pytest
from legato_engine.core import RequestKey
from legato_engine.ipc import service_connections, transport
from legato_engine.ipc.messages import Abort, Heartbeat, Load, Queued
from legato_engine.ipc.transport import EngineTransport

from tests.engine.ipc.both_ends import both_ends, done, loading, submit, until


async def test_commands_from_before_the_engine_came():
    """Commands sent to an engine that is not there yet reach it, in order."""
    with both_ends() as ends:
        service = ends.connect()
        service.submit("a", "b")
        assert await ends.received(2) == [submit("a"), submit("b")]
        service.submit("c")
        assert await ends.received() == [submit("c")]


async def test_a_command_that_leaves_at_once_takes_the_others_along():
    """It is there before the turn of the loop ends, behind all that came before it."""
    with both_ends() as ends:
        service = ends.connect()
        service.submit("a")
        ends.engine.receive()  # lets the service in
        service.transport.send(submit("b"), at_once=True)
        ends.engine.wait(1000)
        assert ends.engine.receive() == [submit("a"), submit("b")]
        service.submit("c")
        assert await ends.received() == [submit("c")]


async def test_a_backlog_of_commands_leaves_when_there_is_room():
    """Commands that the socket did not take follow once the engine reads again."""
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
    """The last words of an engine are heard by who closes, and it is not told of the end."""
    with both_ends() as ends:
        service = ends.connect()
        service.submit("a")
        await ends.received()
        ends.engine.send(done("a"))
        ends.engine.close(0)
        service.transport.close()
        assert service.messages == [done("a")]
        assert service.ends == 0


async def test_the_end_is_told_once_behind_the_last_words():
    """When the engine hangs up, all that it said is delivered and then the end, once."""
    with both_ends() as ends:
        service = ends.connect()
        service.submit("a")
        await ends.received()
        ends.engine.post(Queued(request_id=RequestKey("a"), position=0, estimated_wait=0.0))
        ends.engine.post(done("a", size=1_000_000))
        told_at_end: list[int] = []
        service.transport._on_end = lambda: told_at_end.append(len(service.messages))
        closing = asyncio.create_task(asyncio.to_thread(ends.engine.close, 60_000))
        await until(lambda: told_at_end)
        await closing
        service.transport.send(Abort(request_id=RequestKey("a")))
        await asyncio.sleep(0)
        assert told_at_end == [2]


async def test_who_knocks_between_two_engines_waits_for_the_next():
    """A link made after an engine is gone is answered by the one that comes."""
    with both_ends() as ends:
        ends.engine.close(0)
        service = ends.connect()
        service.submit("a")
        ends.engine = type(ends.engine)(ends.listeners.filenos[0], ends.wake)
        ends.engine.broadcast(loading())
        assert await ends.received() == [submit("a")]
        assert await service.received(1) == [loading()]


async def test_heartbeats_reach_all_and_newcomers():
    """A beat reaches everybody; who comes later hears the next."""
    beats = [Heartbeat(step=i, load=Load(), estimated_wait=0.0) for i in range(2)]
    with both_ends() as ends:
        first = ends.connect()
        ends.subscribers.send(beats[0])
        second = ends.connect()
        ends.subscribers.send(beats[1])
        assert await first.received(2) == beats
        assert await second.received(1) == beats[1:]


async def test_a_listener_that_is_gone_is_dropped():
    """Beats to nobody are no error, and no descriptor stays behind."""
    beat = Heartbeat(step=1, load=Load(), estimated_wait=0.0)
    with both_ends() as ends:
        service = ends.connect()
        ends.subscribers.send(beat)
        service.transport.close()
        ends.subscribers.send(beat)
        assert not ends.subscribers._connections


async def test_who_is_turned_away_is_told():
    """Without an engine, those who wait are hung up on and nobody stays at the doors."""
    with both_ends() as ends:
        services = [ends.connect() for _ in range(3)]
        services[0].transport.close()
        ends.listeners.reject_pending()
        await until(lambda: [service.ends for service in services] == [0, 1, 1])
        ends.engine.broadcast(loading())
        assert len(ends.engine) == 0


async def test_nobody_is_turned_away_by_half(monkeypatch):
    """Who knocks between the two doors keeps both of its connections, or hears of an end."""
    with both_ends() as ends:
        knocks = iter((ends.connect, int))

        def pending_connections_late(door):
            yield from service_connections.pending_connections(door)
            next(knocks)()

        monkeypatch.setattr(transport, "pending_connections", pending_connections_late)
        ends.listeners.reject_pending()
        beat = Heartbeat(step=1, load=Load(), estimated_wait=0.0)
        ends.subscribers.send(beat)
        (service,) = ends.services
        await until(lambda: service.ends or service.messages)
        assert service.ends or service.messages == [beat]


async def test_no_doors():
    """Without doors there is no link, and whoever wants one is told."""
    with both_ends() as ends:
        ends.listeners.close()
        with pytest.raises(OSError, match="No such file"):
            EngineTransport(ends.listeners.endpoint, print, print)
