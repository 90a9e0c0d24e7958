"""Frames in shared memory: the ring that a client writes, and images of any call."""

from __future__ import annotations

import functools
import itertools
import os
import stat
import struct
import threading

import numpy as np
import pytest
from legato.v1 import media_pb2, server_pb2, session_pb2
from legato_client import CaptionTask, RawFrame, SharedMemoryRefused
from legato_client._images.sources import HEADER_SIZE, SharedFrames, SlotsBusy, shm_namespace
from legato_engine.shm import blob_folder

from tests.clients.python.face import session_of, until
from tests.clients.python.fake_server import FakeServer, ignore

PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


def content(frame):
    """What a slot holds: its header's magic and generation, and its bytes."""
    shared = frame.to_image().shared
    data = (blob_folder() / shared.region).read_bytes()
    magic, generation = struct.unpack_from("<8sQ", data, shared.offset - HEADER_SIZE)
    return magic, generation, data[shared.offset : shared.offset + shared.size_bytes]


def regions():
    """The regions of this user that exist now."""
    return set(blob_folder().glob(f"legato-{os.geteuid()}-*"))


def test_an_array_is_written_with_its_layout():
    """The slot holds the pixels, and the message says how they lie and at which generation."""
    with SharedFrames(PIXELS.nbytes) as frames, frames.write(PIXELS) as frame:
        shared = frame.to_image().shared
        assert content(frame) == (b"LEGATO01", shared.generation, PIXELS.tobytes())
        assert (shared.layout.width, shared.layout.height) == (6, 4)
        assert shared.layout.format == media_pb2.PIXEL_FORMAT_RGB8
        assert shared.generation == 2
        assert shared.offset % HEADER_SIZE == 0


@pytest.mark.parametrize(
    "array", [PIXELS[:, ::-1], PIXELS[::2], PIXELS[:, :, 0], np.asfortranarray(PIXELS)]
)
def test_an_array_of_any_order(array):
    """Views are written row by row, as they look."""
    with SharedFrames(1000) as frames, frames.write(array) as frame:
        assert content(frame)[2] == array.tobytes()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_are_a_file_or_pixels_of_a_layout(kind):
    """Without a layout bytes are an image file, with one they are pixels."""
    layout = media_pb2.PixelLayout(width=4, height=2, format=media_pb2.PIXEL_FORMAT_NV12)
    with SharedFrames(100) as frames:
        file = frames.write(kind(b"file"), mime_type="image/jpeg").to_image().shared
        assert file.WhichOneof("content") == "mime_type"
        assert (file.mime_type, file.size_bytes) == ("image/jpeg", 4)
        pixels = frames.write(kind(bytes(12)), layout=layout).to_image().shared
        assert pixels.layout == layout
        unnamed = frames.write(kind(b"file")).to_image().shared
        assert unnamed.WhichOneof("content") == "mime_type"


def test_slots_are_written_in_turn_and_never_while_they_are_used():
    """Each frame keeps its slot until it is released, and a full ring refuses one more."""
    with SharedFrames(10, num_slots=2) as frames:
        first, second = frames.write(b"1"), frames.write(b"2")
        with pytest.raises(SlotsBusy):
            frames.write(b"3")
        first.release()
        first.release()
        assert frames.num_free == 1
        third = frames.write(b"3")
        assert third.to_image().shared.offset == first.to_image().shared.offset
        assert third.to_image().shared.generation == 4
        assert content(second) == (b"LEGATO01", 2, b"2")
        assert content(third) == (b"LEGATO01", 4, b"3")


def test_a_writer_can_wait_for_a_slot():
    """With a timeout, a release in another thread lets the writer go on."""
    with SharedFrames(10, num_slots=1) as frames:
        frame = frames.write(b"1")
        threading.Timer(0.05, frame.release).start()
        assert content(frames.write(b"2", timeout=60))[2] == b"2"


def test_the_region_is_private_and_goes():
    """Only this user may open it, slots do not overlap, and nothing is left."""
    before = regions()
    with SharedFrames(100, num_slots=3) as frames:
        (path,) = regions() - before
        assert path.name == frames.region
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        offsets = [frames.write(bytes(100)).to_image().shared.offset for _ in range(3)]
        assert all(b - a >= 100 + HEADER_SIZE for a, b in itertools.pairwise(offsets))
    assert regions() == before
    frames.close()
    with pytest.raises(ValueError, match="closed"):
        frames.write(b"x")
    SharedFrames(100)
    assert regions() == before


@pytest.mark.parametrize(
    "frame",
    [b"", bytes(101), PIXELS.astype(np.float32), np.zeros((2, 2, 2), np.uint8), np.uint8(3)],
)
def test_what_is_no_frame_is_refused(frame):
    """Too many bytes, none, or an array of another kind take no slot."""
    with SharedFrames(100, num_slots=1) as frames:
        with pytest.raises(ValueError, match=r"a slot takes|need a"):
            frames.write(frame)
        assert frames.num_free == 1


def test_the_namespace_names_boot_and_device():
    """Client and server on one host find the same name."""
    boot_id, device = shm_namespace().split(":")
    assert len(boot_id) == 36
    assert int(device) == blob_folder().stat().st_dev


# ---------------------------------------------------------------- shared frames
# Frames in shared memory as images of any call.

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
