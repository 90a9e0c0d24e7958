"""Intake of images, without a server."""

import io

import pytest
from legato.v1 import media_pb2
from legato_engine.errors import ImageTooLarge, ImageUndecodable
from legato_service.images.intake import ImageIntake, InlineImage
from PIL import Image

MAX_BYTES = 100_000


def jpeg(header_bytes, size=(40, 30)):
    """Return a JPEG whose size follows so many bytes of comments."""
    buffer = io.BytesIO()
    Image.new("RGB", size, "red").save(buffer, "JPEG")
    data = buffer.getvalue()
    comment = b"\xff\xfe\x10\x02" + bytes(0x1000)
    return data[:2] + comment * (header_bytes // len(comment)) + data[2:]


def intake():
    """Return an intake with a limit of 2000 pixels."""
    return ImageIntake(max_bytes=MAX_BYTES, max_pixels=2000)


def message(data):
    """Return an image as a request has it."""
    return media_pb2.Image(encoded=media_pb2.EncodedImage(data=data))


@pytest.mark.parametrize("header_bytes", [0, 50_000])
async def test_a_header_of_any_length_is_read(header_bytes):
    """The header gives the type, within the prefix or far beyond it."""
    data = jpeg(header_bytes)
    assert await intake().check(message(data)) == InlineImage(data, "image/jpeg")


@pytest.mark.parametrize("header_bytes", [0, 50_000])
async def test_too_many_pixels_after_a_header_of_any_length(header_bytes):
    """The limit on pixels holds however long the header is."""
    with pytest.raises(ImageTooLarge) as failure:
        await intake().check(message(jpeg(header_bytes, (50, 41))))
    assert failure.value.metadata["field"] == "image.encoded.data"
    assert failure.value.metadata["unit"] == "pixels"


async def test_too_many_bytes_after_a_short_header():
    """The limit on bytes counts the whole file, not the prefix."""
    with pytest.raises(ImageTooLarge) as failure:
        await intake().check(message(jpeg(0) + bytes(MAX_BYTES)))
    assert failure.value.metadata["unit"] == "bytes"


@pytest.mark.parametrize("data", [b"", b"GIF89a", jpeg(50_000)[:30_000]])
async def test_bytes_without_a_header_are_refused(data):
    """Bytes without a readable header are refused."""
    with pytest.raises(ImageUndecodable):
        await intake().check(message(data))
