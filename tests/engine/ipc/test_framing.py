"""Messages on a byte stream."""

import socket

import pytest
from legato_engine.ipc.framing import FrameReader, FrameWriter

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
