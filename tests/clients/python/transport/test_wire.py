"""Requests as bytes."""

import numpy as np
import pytest
from google.protobuf.message import Message
from legato.v1 import inference_pb2 as pb
from legato.v1 import media_pb2, server_pb2, session_pb2
from legato_client._grpc.channel import to_bytes
from legato_client._images.sources import CachedImage, to_image

IMAGES = {
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
@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_bytes_are_the_request(kind, image):
    """Parsed, the bytes give the request as it was, whatever its image."""
    request = kind(image=image(), options=pb.RequestOptions(request_id="r"))
    expected = kind.FromString(request.SerializeToString())
    assert kind.FromString(to_bytes(request)) == expected


@pytest.mark.parametrize("kind", [pb.QueryRequest, pb.RunTasksRequest, pb.GenerateRequest])
@pytest.mark.parametrize("file", [b"", b"\xff\xd8", bytes(range(256)) * 1000])
def test_a_file_beside_its_request(kind, file):
    """A file's bytes that never were in the message give the same request."""
    options = pb.RequestOptions(request_id="r")
    expected = kind(image=to_image(file), options=options)
    assert kind.FromString(to_bytes(kind(options=options), file)) == expected


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_a_frame_of_a_session(image):
    """The same holds for an image inside a session's message."""
    frame = session_pb2.Frame(stamp=media_pb2.FrameStamp(sequence=3), image=image())
    request = session_pb2.SessionRequest(frame=frame)
    expected = request.FromString(request.SerializeToString())
    assert type(request).FromString(to_bytes(request)) == expected


def test_a_request_that_has_no_image():
    """Requests of other services are serialized as ever."""
    requests: list[Message] = [
        server_pb2.ListModelsRequest(page_size=3),
        session_pb2.SessionRequest(grant=session_pb2.GrantCredits(responses=2)),
    ]
    for request in requests:
        assert to_bytes(request) == request.SerializeToString()
