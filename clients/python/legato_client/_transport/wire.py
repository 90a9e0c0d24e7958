"""Requests as bytes."""

from __future__ import annotations

from google.protobuf.message import Message
from legato.v1 import media_pb2, session_pb2

_FIELDS = {  # of `Image.source`, those that hold bytes: the number of `data` in them, and theirs
    "encoded": (media_pb2.EncodedImage.DATA_FIELD_NUMBER, media_pb2.Image.ENCODED_FIELD_NUMBER),
    "raw": (media_pb2.RawImage.DATA_FIELD_NUMBER, media_pb2.Image.RAW_FIELD_NUMBER),
}
_LENGTH_DELIMITED = 2


def to_bytes(request: Message, file: bytes | None = None) -> bytes:
    """Serialize a request with one copy of its image's bytes; `request` must not be used again.

    `file` is the image if it is an encoded file that the message lacks. protobuf copies a large
    field several times while it encodes, so the image's bytes are appended as a second `image`
    field, which a parser merges into the first.
    """
    if file is not None:
        number = request.DESCRIPTOR.fields_by_name["image"].number
        return _ending_with(file, (*_FIELDS["encoded"], number), request)
    path, image = _image_of(request)
    source = image.WhichOneof("source") if image is not None else None
    if image is None or source not in _FIELDS:
        return request.SerializeToString()
    holder: media_pb2.EncodedImage | media_pb2.RawImage = getattr(image, source)
    data = holder.data
    holder.ClearField("data")
    return _ending_with(data, (*_FIELDS[source], *path), request)


def _ending_with(data: bytes, path: tuple[int, ...], request: Message) -> bytes:
    """Serialize the request and append `data` in the fields of `path`, the innermost first."""
    tail_size, headers = len(data), b""
    for number in path:
        header = _header(number, tail_size)
        headers = header + headers
        tail_size += len(header)
    return b"".join((request.SerializeToString(), headers, data))


def _image_of(request: Message) -> tuple[tuple[int, ...], media_pb2.Image | None]:
    """The request's image, and the fields that lead to it, the innermost first."""
    if isinstance(request, session_pb2.SessionRequest):
        path = (session_pb2.Frame.IMAGE_FIELD_NUMBER, session_pb2.SessionRequest.FRAME_FIELD_NUMBER)
        return path, request.frame.image if request.HasField("frame") else None
    image = getattr(request, "image", None)
    if not isinstance(image, media_pb2.Image):
        return (), None
    return (request.DESCRIPTOR.fields_by_name["image"].number,), image


def _header(number: int, size: int) -> bytes:
    """What precedes a field of `size` bytes."""
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(size)


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)
