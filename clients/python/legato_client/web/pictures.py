"""Pictures inside JSON: data URLs, and nothing that would have to be fetched."""

from __future__ import annotations

import asyncio
import base64
import binascii

from legato_client.web.errors import Refused

_LARGE = 256 * 1024  # characters that take the event loop too long to decode


async def decoded(url: str, field: str) -> bytes:
    """The bytes of a data URL in base64.

    Raises:
        Refused: it names a place elsewhere, or is malformed.
    """
    head, comma, text = url.partition(",")
    scheme = head.partition(":")[0].lower()
    if scheme in ("http", "https"):
        raise Refused(
            "no URL is fetched: send the picture itself, as data:image/jpeg;base64,...",
            field=field,
        )
    if scheme != "data" or not comma or not head.lower().endswith(";base64"):
        raise Refused("a picture is a data URL: data:image/jpeg;base64,...", field=field)
    try:
        if len(text) > _LARGE:
            return await asyncio.to_thread(_decode, text)
        return _decode(text)
    except (binascii.Error, ValueError):
        raise Refused("the data URL is not valid base64", field=field) from None


def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
