"""What a client learns of its server, and what it refuses to send after that."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest
from legato.v1 import server_pb2
from legato_client import ClientTooOld, ImageInput, InvalidArgument, Unimplemented
from legato_client._grpc.channel import COMMON_REQUEST_BYTES
from legato_client._version import CONTRACT_REVISION
from legato_service.services import server as real
from PIL import Image

from tests.clients.python.failures import Failure

LARGE = bytes(COMMON_REQUEST_BYTES + 1)
SMALL = b"picture"


def info(**fields: Any) -> server_pb2.GetServerInfoResponse:
    """What a server says of itself."""
    return server_pb2.GetServerInfoResponse(name="legato", **fields)


def test_revision():
    """The client and the service of one repository speak the same contract."""
    assert CONTRACT_REVISION == real.CONTRACT_REVISION


def test_a_server_that_moved_on(client, server):
    """A server that needs a newer client is named as such at the first look."""
    server.script["GetServerInfo"].append(info(minimum_client_revision=CONTRACT_REVISION + 1))
    with pytest.raises(ClientTooOld, match="upgrade") as caught:
        client.server_info()
    assert caught.value.metadata["actual"] == str(CONTRACT_REVISION)


def test_large_requests_are_measured(client, server):
    """A request over the server's own limit is refused before it is sent, with both numbers."""
    limits = server_pb2.Limits(max_request_bytes=COMMON_REQUEST_BYTES)
    server.script["GetServerInfo"].append(info(limits=limits))
    with pytest.raises(InvalidArgument) as caught:
        client.detect(LARGE, "cat")
    assert caught.value.reason == "IMAGE_TOO_LARGE"
    assert caught.value.metadata["limit"] == str(COMMON_REQUEST_BYTES)
    assert int(caught.value.metadata["actual"]) > COMMON_REQUEST_BYTES
    assert server.count("Detect") == 0


@pytest.mark.parametrize("kind", ["file", "path", "array", "Pillow"])
def test_an_image_beyond_a_request_is_refused_with_the_way_around(client, server, tmp_path, kind):
    """Photos of 12 megapixels are, as pixels and as PNG: `put_image` takes them, and is named."""
    limits = server_pb2.Limits(max_request_bytes=COMMON_REQUEST_BYTES)
    server.script["GetServerInfo"].append(info(limits=limits))
    noise = np.random.default_rng(0).integers(0, 256, (1200, 1200, 3), dtype=np.uint8)
    path = tmp_path / "a.png"
    path.write_bytes(LARGE)
    images: dict[str, ImageInput] = {
        "file": LARGE, "path": path, "array": noise, "Pillow": Image.fromarray(noise),
    }  # fmt: skip
    with pytest.raises(InvalidArgument, match=f"limit is {COMMON_REQUEST_BYTES}.*`put_image`"):
        client.query(images[kind], "What is it?")
    assert server.count("Query") == 0
    held = client.put_image(images[kind])
    assert client.query(held, "What is it?").answer
    assert server.last("Query").image.image_id == held.image_id


def test_small_requests_ask_nothing(client, server):
    """A request that any server takes costs no look at the limits."""
    client.detect(SMALL, "cat")
    assert server.count("GetServerInfo") == 0


def test_a_server_that_says_nothing(client, server):
    """Where there is no GetServerInfo, a large request goes out as it is."""
    server.script["GetServerInfo"].append(Failure(grpc.StatusCode.UNIMPLEMENTED))
    server.script["Detect"].append(Failure(grpc.StatusCode.UNIMPLEMENTED, "reached"))
    with pytest.raises(Unimplemented, match="reached"):
        client.detect(LARGE, "cat")
