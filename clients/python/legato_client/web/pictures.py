"""Pictures inside JSON: data URLs, and nothing that would have to be fetched."""

from __future__ import annotations

import asyncio
import base64
import binascii

from legato_client.web.errors import Refused

_LARGE = 256 * 1024  # characters that take the event loop too long to decode
_LONGEST_HEAD = 256  # characters before the comma
_PIECE = 1024 * 1024  # characters, whole groups of four: no other thread runs while they are decoded


async def decoded(url: str, field: str) -> bytes:
    """The bytes of a data URL in base64.

    Raises:
        Refused: it names a place elsewhere, or is malformed.
    """
    head, comma = url[:_LONGEST_HEAD].partition(",")[:2]
    scheme = head.partition(":")[0].lower()
    if scheme in ("http", "https"):
        raise Refused(
            "no URL is fetched: send the picture itself, as data:image/jpeg;base64,...",
            field=field,
        )
    if scheme != "data" or not comma or not head.lower().endswith(";base64"):
        raise Refused("a picture is a data URL: data:image/jpeg;base64,...", field=field)
    try:
        if len(url) > _LARGE:
            return await asyncio.to_thread(_decode, url, len(head) + 1)
        return _decode(url, len(head) + 1)
    except (binascii.Error, ValueError):
        raise Refused("the data URL is not valid base64", field=field) from None


def _decode(url: str, start: int) -> bytes:
    """Decode in pieces, without a copy of the whole text."""
    decoded = bytearray()
    for at in range(start, len(url), _PIECE):
        piece = base64.b64decode(url[at : at + _PIECE], validate=True)
        if at + _PIECE < len(url) and len(piece) != _PIECE // 4 * 3:
            raise binascii.Error("padding inside of the text")
        decoded += piece
    return bytes(decoded)
