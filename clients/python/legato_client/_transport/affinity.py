"""The metadata by which a proxy sends calls about one image, or of one session, to one server."""

from __future__ import annotations

from urllib.parse import quote

from google.protobuf.message import Message
from legato.v1 import image_pb2, media_pb2, session_pb2

KEY = "legato-affinity"


def of(request: Message) -> str:
    """The id of the image that a server has to hold, or the session's name; empty: any server."""
    match request:
        case session_pb2.SessionOpen():
            return _text(request.session_name)
        case image_pb2.DeleteImageRequest():
            return _text(request.image_id)
    image = getattr(request, "image", None)
    return _text(image.image_id) if isinstance(image, media_pb2.Image) else ""


def _text(value: str) -> str:
    """As metadata takes it: printable ASCII."""
    return quote(value, safe="")
