"""The metadata that keeps calls about one image, or of one session, on one server."""

from __future__ import annotations

import pytest
from legato.v1 import image_pb2, inference_pb2, media_pb2, session_pb2
from legato_client import RawFrame
from legato_client._grpc import channel
from legato_client._images.sources import to_image
from legato_client._proto.requests import Upload
from legato_engine.images import decoding
from legato_engine.images.raw import row_bytes
from legato_engine.types import BlobRef, PixelFormat, RawImage

HELD = media_pb2.Image(image_id="img_1")


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (inference_pb2.DetectRequest(image=HELD), "img_1"),
        (inference_pb2.GenerateRequest(image=HELD), "img_1"),
        (image_pb2.DeleteImageRequest(image_id="img_1"), "img_1"),
        (session_pb2.SessionOpen(session_name="arm 7\n"), "arm%207%0A"),
        (session_pb2.SessionOpen(), ""),
        (inference_pb2.QueryRequest(question="why?"), ""),
        (inference_pb2.DetectRequest(image=to_image(b"jpeg")), ""),
    ],
)
def test_what_names_a_server(request_, expected):
    """An image id or a session's name, as printable ASCII; other calls go anywhere."""
    assert channel.of(request_) == expected


def test_an_uploads_id_is_known_before_it_is_sent():
    """The client derives the id of a file as the engine does."""
    assert Upload.of(to_image(b"jpeg"), None).image_id == decoding.image_id(
        decoding.content_key(b"jpeg")
    )


@pytest.mark.parametrize("form", list(PixelFormat))
@pytest.mark.parametrize("stride", [0, 64])
def test_pixels_have_the_engines_id_too(form, stride):
    """In every format, with padded rows or none."""
    frame = RawFrame(bytes(64 * 3), 2, 2, form.value, stride)
    raw = RawImage(
        blob=BlobRef(name="", size=0),
        width=2,
        height=2,
        row_stride=stride or row_bytes(form, 2),
        format=form,
    )
    upload = Upload.of(to_image(frame), None)
    assert upload.image_id == decoding.image_id(decoding.content_key(upload.data, raw))
