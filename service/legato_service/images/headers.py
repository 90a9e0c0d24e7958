"""Image files on their way in: what their headers say, and whether that may be."""

from __future__ import annotations

import asyncio

from legato_engine.errors import ImageUndecodable, InvalidRequest
from legato_engine.images.decoding import ImageHeader, inspect

FileFields = tuple[str, str]
"""Where a request has a file's bytes, and where it states their type."""

_GLANCE = 4096  # bytes that the event loop reads itself


async def file_type(
    data: bytes | memoryview, stated: str, *, max_bytes: int, max_pixels: int, fields: FileFields
) -> str:
    """The type of an image file, from its header; a long header is read on a worker thread.

    `stated` is what its sender says it is, or empty. Raises `ImageUndecodable` or `ImageTooLarge`.
    """
    try:
        header = _glance(data, max_bytes, max_pixels)
        if header is None:
            header = await asyncio.to_thread(
                inspect, data, max_pixels=max_pixels, max_bytes=max_bytes
            )
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
    return header.mime_type


def _glance(data: bytes | memoryview, max_bytes: int, max_pixels: int) -> ImageHeader | None:
    """The header where it is short, as it mostly is; None where a thread has to look.

    Headers are read from the front, so one that is found in a part is the header of the whole.
    """
    if len(data) > max_bytes:
        return None
    try:
        return inspect(bytes(data[:_GLANCE]), max_pixels=max_pixels, max_bytes=max_bytes)
    except ImageUndecodable:
        return None
