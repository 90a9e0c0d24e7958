"""Messages on a byte stream, a service process's transport and its latency."""

import asyncio
import os
import socket

import pytest
from legato_engine.errors import InvalidField
from legato_engine.ipc import latency_policy, service_connections, transport
from legato_engine.ipc.framing import FrameReader, FrameWriter
from legato_engine.ipc.latency_policy import LOW_LATENCY, SHARED, BusyPoll, resolve, setting_in
from legato_engine.ipc.messages import Abort, Heartbeat, QueuePosition, SchedulerLoad
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
        ends.engine.post(QueuePosition(request_id=RequestKey("a"), position=0, estimated_wait=0.0))
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
    beats = [Heartbeat(step=i, load=SchedulerLoad(), estimated_wait=0.0) for i in range(2)]
    with both_ends() as ends:
        first = ends.connect()
        ends.subscribers.send(beats[0])
        second = ends.connect()
        ends.subscribers.send(beats[1])
        assert await first.received(2) == beats
        assert await second.received(1) == beats[1:]


async def test_a_closed_subscriber_is_dropped():
    """A heartbeat to a closed connection raises nothing and closes its socket."""
    beat = Heartbeat(step=1, load=SchedulerLoad(), estimated_wait=0.0)
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
        beat = Heartbeat(step=1, load=SchedulerLoad(), estimated_wait=0.0)
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


# ---------------------------------------------------------------- framing

MESSAGES = [b"", b"x", bytes(range(256)) * 40, b"last"]


@pytest.fixture
def ends():
    """Two connected non-blocking sockets."""
    left, right = socket.socketpair()
    for end in (left, right):
        end.setblocking(False)
    with left, right:
        yield left, right


def test_messages_keep_their_bounds_and_order(ends):
    """Messages are received as they were added, an empty one included."""
    left, right = ends
    writer, reader = FrameWriter(), FrameReader()
    for message in MESSAGES:
        writer.add(message)
    assert writer.write_to(left)
    while reader.read_from(right):
        pass
    assert reader.take() == MESSAGES
    assert reader.take() == []


def test_a_message_is_returned_when_it_is_complete(ends):
    """A message that arrives byte by byte is returned once, with its last byte."""
    left, right = ends
    writer, reader = FrameWriter(), FrameReader()
    writer.add(b"hello")
    assert writer.write_to(left)
    data = right.recv(100)
    given = []
    for byte in data:
        left.send(bytes((byte,)))
        assert reader.read_from(right)
        given.append(reader.take())
    assert given == [[]] * (len(data) - 1) + [[b"hello"]]


def test_a_full_socket_loses_nothing(ends):
    """Bytes that the socket does not take stay in the queue, before later messages."""
    left, right = ends
    writer, reader = FrameWriter(), FrameReader()
    messages = [bytes((i,)) * 100_000 for i in range(40)]
    for message in messages[:39]:
        writer.add(message)
    assert not writer.write_to(left)
    writer.add(messages[39])
    received: list[bytes] = []
    sent = False
    while not sent or len(received) < 40:
        sent = writer.write_to(left)
        reader.read_from(right)
        received += reader.take()
    assert received == messages


def test_the_end_is_seen_after_the_last_message(ends):
    """A closed connection still delivers what was sent before."""
    left, right = ends
    writer, reader = FrameWriter(), FrameReader()
    writer.add(b"bye")
    assert writer.write_to(left)
    left.close()
    while reader.read_from(right):
        pass
    assert reader.take() == [b"bye"]
    assert reader.ended


def test_writing_to_a_closed_connection_raises(ends):
    """A closed connection raises, so that the queue cannot grow unnoticed."""
    left, right = ends
    right.close()
    writer = FrameWriter()
    writer.add(b"x")
    with pytest.raises(OSError, match="pipe"):
        writer.write_to(left)


# ---------------------------------------------------------------- busy poll
# An asyncio loop that does not sleep for a while.


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


# ---------------------------------------------------------------- latency policy
# The latency policy of a process.


@pytest.mark.parametrize(
    ("setting", "cores", "policy"),
    [
        ("auto", 7, SHARED),
        ("auto", 8, LOW_LATENCY),
        ("low-latency", 1, LOW_LATENCY),
        ("shared", 64, SHARED),
    ],
)
def test_auto_depends_on_the_number_of_cores(monkeypatch, setting, cores, policy):
    """`auto` is low latency with 8 or more cores; the other settings ignore cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    resolve.cache_clear()
    try:
        assert resolve(setting) is policy
    finally:
        resolve.cache_clear()


def test_an_unknown_setting_is_refused():
    """The error names the setting's field."""
    with pytest.raises(InvalidField) as caught:
        latency_policy.resolve("fast")
    assert caught.value.metadata["field"] == "latency_policy"


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ([], "auto"),
        (["serve", "--latency-policy", "shared"], "shared"),
        (["--listen", "x", "--latency-policy=low-latency", "--insecure"], "low-latency"),
        (["--latency", "shared"], "shared"),
        (["--latency-policy", "fast"], "auto"),
        (["--latency-policy"], "auto"),
        (["-q", "--", "--latency-policy", "shared"], "auto"),
    ],
)
def test_the_setting_is_found_before_options_are_parsed(arguments, setting):
    """All forms that the parser of options accepts are found; malformed ones are `auto`."""
    assert setting_in(arguments) == setting
