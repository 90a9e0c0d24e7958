"""Requests as bytes."""

import numpy as np
import pytest
from legato.v1 import inference_pb2 as pb
from legato.v1 import media_pb2, server_pb2
from legato_client._images import CachedImage, to_image
from legato_client._wire import to_bytes

PICTURES = {
    "none": lambda: None,
    "empty": lambda: to_image(b""),
    "short": lambda: to_image(b"\xff\xd8"),
    "long": lambda: to_image(bytes(range(256)) * 1000),
    "typed": lambda: media_pb2.Image(
        encoded=media_pb2.EncodedImage(data=b"x" * 127, mime_type="image/png")
    ),
    "raw": lambda: to_image(np.arange(60, dtype=np.uint8).reshape(4, 5, 3)),
    "id": lambda: to_image(CachedImage("img_1")),
}


@pytest.mark.parametrize("kind", [pb.QueryRequest, pb.RunTasksRequest, pb.GenerateRequest])
@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
def test_bytes_are_the_request(kind, picture):
    """Parsed, the bytes give the request as it was, whatever its picture."""
    request = kind(image=picture(), options=pb.RequestOptions(request_id="r"))
    expected = kind.FromString(request.SerializeToString())
    assert kind.FromString(to_bytes(request)) == expected


def test_a_request_that_has_no_picture():
    """Requests of other services are serialized as ever."""
    request = server_pb2.ListModelsRequest(page_size=3)
    assert to_bytes(request) == request.SerializeToString()
