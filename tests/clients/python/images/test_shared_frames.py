"""Frames in shared memory as images of any call."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from legato.v1 import media_pb2, server_pb2, session_pb2
from legato_client import (
    CaptionTask,
    RawFrame,
    SharedFrames,
    SharedMemoryRefused,
    shm_namespace,
)

from tests.clients.python.face import session_of
from tests.clients.python.fake_server import FakeServer
from tests.clients.python.fake_sessions import ignore
from tests.clients.python.until import until

FRAME = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)


@pytest.fixture
def ring():
    """Four slots."""
    with SharedFrames(slot_bytes=100) as frames:
        yield frames


def allow(server: FakeServer, namespace: str | None = None) -> None:
    """Let the server read this namespace, its host's own where none is given."""
    name = shm_namespace() if namespace is None else namespace
    server.script["GetServerInfo"].append(server_pb2.GetServerInfoResponse(shm_namespace=name))


def test_a_frame_is_sent_by_name(client, server, ring):
    """A shared frame travels as its slot; the server is asked once whether it can read it."""
    allow(server)
    with ring.write(FRAME) as frame:
        client.detect(frame, "cat")
    sent = server.last("Detect").image.shared
    assert (sent.region, sent.size_bytes) == (ring.region, 60)
    assert (sent.layout.width, sent.layout.height) == (5, 4)
    assert ring.num_free == 4


@pytest.mark.parametrize("namespace", ["", "another-host:7"])
def test_another_hosts_memory(client, server, ring, namespace):
    """A server that reads no shared memory, or another host's, is not sent a slot."""
    allow(server, namespace)
    with ring.write(FRAME) as frame, pytest.raises(SharedMemoryRefused, match="send the bytes"):
        client.detect(frame, "cat")
    assert server.count("Detect") == 0


def test_a_cameras_frame_in_a_slot(ring):
    """A raw frame keeps its format and its padding in a slot."""
    with ring.write(RawFrame(bytes(8 + 6), 2, 2, "bgr8", stride=8)) as frame:
        layout = frame.to_image().shared.layout
    assert (layout.format, layout.row_stride_bytes) == (media_pb2.PIXEL_FORMAT_BGR8, 8)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_session_gives_slots_back(kind, server, ring):
    """A slot is free again once the server took or dropped its frame, or the session ended."""
    server.sessions.frame_credits = 4
    server.sessions.on_frame = ignore
    connect = functools.partial(session_of, kind, server.target)
    with connect([CaptionTask()]) as session:
        allow(server)
        for _ in range(4):
            session.send(ring.write(FRAME))
        assert ring.num_free == 0
        conversation = server.sessions.last
        until(lambda: len(conversation.frames) == 4)
        assert conversation.frames[0].image.shared.region == ring.region
        conversation.accept(1)
        until(lambda: ring.num_free == 1)
        conversation.drop(2, session_pb2.DROP_REASON_SUPERSEDED)
        until(lambda: ring.num_free == 2)
    assert ring.num_free == 4
