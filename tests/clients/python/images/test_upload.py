"""Images sent once and asked about many times."""

from __future__ import annotations

import datetime

import grpc
import numpy as np
import pytest
from legato.v1 import media_pb2
from legato_client import CachedImage, HeldImage, ImageNotFound, QuotaExceeded, RawFrame

from tests.clients.python.failures import failure, retry_info
from tests.clients.python.fake_images import BEST_CHUNK

JPEG = bytes(range(256)) * 2500  # 625 KiB: three chunks


def test_upload_whole(client, server):
    """An image arrives byte for byte, in chunks of the size the contract calls best."""
    held = client.put_image(JPEG, ttl=90)
    header, data = server.images.held[held.image_id]
    assert data == JPEG
    assert header.ttl.seconds == 90
    assert server.images.chunks == [BEST_CHUNK, BEST_CHUNK, len(JPEG) - 2 * BEST_CHUNK]


def test_what_is_held(client):
    """The value says the id, the upright size and the end of its time."""
    held = client.put_image(b"jpeg", ttl=60)
    assert (held.width, held.height) == (20, 10)
    assert held.expire_time == datetime.datetime.fromtimestamp(1_000_000_060, datetime.UTC)


def test_a_held_image_stands_for_its_bytes(client, server):
    """What `put_image` gives is an image for every other call, sent as its id."""
    held = client.put_image(b"jpeg")
    client.detect(held, "cat")
    assert server.last("Detect").image.image_id == held.image_id
    assert isinstance(held, CachedImage)


def test_arrays_are_uploaded_as_pixels(client, server):
    """An array, or a camera's frame, is uploaded with its layout."""
    array = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    header, data = server.images.held[client.put_image(array).image_id]
    assert (header.layout.width, header.layout.height) == (5, 4)
    assert data == array.tobytes()
    frame = RawFrame(bytes(6), 2, 2, "nv12")
    header, _ = server.images.held[client.put_image(frame).image_id]
    assert header.layout.format == media_pb2.PIXEL_FORMAT_NV12
    assert not header.HasField("ttl")


def test_only_bytes_are_uploaded(client, server):
    """An image that is only a name cannot be uploaded."""
    with pytest.raises(TypeError, match="own bytes"):
        client.put_image(CachedImage("img_1"))
    with pytest.raises(ValueError, match="must be 0 to"):
        client.put_image(b"jpeg", ttl=-1)
    assert not server.images.metadata


def test_delete(client, server):
    """An image is forgotten by value or id; one that is not held is ImageNotFound."""
    held = client.put_image(b"jpeg")
    client.delete_image(held)
    assert not server.images.held
    with pytest.raises(ImageNotFound):
        client.delete_image(held.image_id)


def test_a_full_server_is_asked_again(client, server):
    """An upload that meets a full server is sent whole a second time, when the server said."""
    full = grpc.StatusCode.RESOURCE_EXHAUSTED
    server.images.script.append(failure(full, "QUEUE_FULL", retry_info(0.01)))
    assert server.images.held[client.put_image(JPEG).image_id][1] == JPEG
    assert len(server.images.metadata) == 2


def test_a_refusal_in_the_middle(client, server):
    """An upload that is refused while it is being sent fails with the server's reason."""
    full = failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
    for _ in range(20):
        server.images.script.append(full)
        with pytest.raises(QuotaExceeded):
            client.put_image(bytes(4_000_000))


def test_the_other_name(client):
    """`encode_image`, as the moondream SDK has it, is `put_image`."""
    assert isinstance(client.encode_image(b"jpeg"), HeldImage)
