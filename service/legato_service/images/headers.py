"""The type of an image file, from its header."""

from __future__ import annotations

from legato_engine.errors import ImageUndecodable, InvalidRequest
from legato_engine.images.headers import inspect

from legato_service.images.pixel_quota import take_pixels

FileFields = tuple[str, str]
"""The request's fields with the bytes of a file and with their stated type."""


def file_type(
    data: bytes | memoryview, stated: str, *, max_bytes: int, max_pixels: int, fields: FileFields
) -> str:
    """Check an image file's header against the limits; return its MIME type.

    `stated` is the type according to the client, or empty.

    Raises:
        ImageUndecodable: the header is malformed, or of another type than stated.
        ImageTooLarge: the file is over a limit that its header shows.
        QuotaExceeded: the caller has sent too many pixels.
    """
    try:
        header = inspect(data, max_pixels=max_pixels, max_bytes=max_bytes)
    except InvalidRequest as error:
        error.metadata["field"] = fields[0]
        raise
    if stated and stated.lower() != header.mime_type:
        raise ImageUndecodable(
            f"the bytes are {header.mime_type}",
            field=fields[1],
            stated=stated,
            actual=header.mime_type,
        )
    take_pixels(header.width, header.height)
    return header.mime_type
