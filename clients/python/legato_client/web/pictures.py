"""Pictures inside JSON: data URLs, and nothing that would have to be fetched."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import re

from legato_client.web.errors import Refused

_LARGE = 256 * 1024  # characters that take the event loop too long to decode
_BASE64 = re.compile(r"; *base64 *$", re.IGNORECASE)
_STANDARD = bytes.maketrans(b"-_", b"+/")
_ESCAPES = [
    (b"%" + digits, bytes.fromhex(digits.decode()))
    for digits in (
        b"2B",
        b"2b",
        b"2F",
        b"2f",
        b"3D",
        b"3d",
        b"20",
        b"09",
        b"0A",
        b"0a",
        b"0D",
        b"0d",
    )
]
"""What encoders escape: signs of base64 that are not letters or digits, and whitespace."""


async def decoded(url: str, field: str) -> bytes:
    """Decode a data URL in base64 as browsers do.

    Line breaks and other whitespace, absent padding, the URL-safe alphabet and percent-encoded
    characters of base64 are accepted.

    Raises:
        Refused: it names a place elsewhere, or is malformed.
    """
    head, comma, text = url.strip().partition(",")
    scheme = head.partition(":")[0].lower()
    if scheme in ("http", "https"):
        raise Refused(
            "no URL is fetched: send the picture itself, as data:image/jpeg;base64,...",
            field=field,
        )
    if scheme != "data" or not comma or not _BASE64.search(head):
        raise Refused("a picture is a data URL: data:image/jpeg;base64,...", field=field)
    try:
        if len(text) > _LARGE:
            return await asyncio.to_thread(_decode, text)
        return _decode(text)
    except (binascii.Error, ValueError):
        raise Refused("the data URL is not valid base64", field=field) from None


def _decode(text: str) -> bytes:
    with contextlib.suppress(ValueError):
        return base64.b64decode(text, validate=True)
    data = text.encode("ascii")
    # `unquote_to_bytes` takes 75 times the memory of a text that consists of escapes.
    for escape, character in _ESCAPES if b"%" in data else ():
        data = data.replace(escape, character)
    data = data.translate(_STANDARD, delete=b" \t\n\f\r").rstrip(b"=")
    return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
