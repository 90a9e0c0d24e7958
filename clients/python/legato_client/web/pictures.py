"""Pictures inside JSON: data URLs, and nothing that would have to be fetched."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import re
import time

from legato_client.web.errors import Refused

_LARGE = 256 * 1024  # characters that take the event loop too long to decode
_LONGEST_HEAD = 256  # characters before the comma
_PIECE = 256 * 1024  # characters, whole groups of four; no other thread runs meanwhile
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
    url = url.strip()
    head, comma = url[:_LONGEST_HEAD].partition(",")[:2]
    scheme = head.partition(":")[0].lower()
    if scheme in ("http", "https"):
        raise Refused(
            "no URL is fetched: send the picture itself, as data:image/jpeg;base64,...",
            field=field,
        )
    if scheme != "data" or not comma or not _BASE64.search(head):
        raise Refused("a picture is a data URL: data:image/jpeg;base64,...", field=field)
    try:
        if len(url) > _LARGE:
            return await asyncio.to_thread(_decode, url, len(head) + 1)
        return _decode(url, len(head) + 1)
    except (binascii.Error, ValueError):
        raise Refused("the data URL is not valid base64", field=field) from None


def _decode(url: str, start: int) -> bytes:
    """Decode in pieces, without a copy of the whole text."""
    if url.find("%", start) >= 0:
        data = url[start:].encode("ascii")
        # `unquote_to_bytes` takes 75 times the memory of a text that consists of escapes.
        for escape, character in _ESCAPES:
            data = data.replace(escape, character)
        url, start = data.decode("ascii"), 0
    decoded, rest = bytearray(), b""
    for at in range(start, len(url), _PIECE):
        piece, is_last = url[at : at + _PIECE], at + _PIECE >= len(url)
        if at > start:
            time.sleep(0)  # lets the event loop's thread run
        if not rest:
            with contextlib.suppress(ValueError):
                plain = base64.b64decode(piece, validate=True)
                if is_last or len(plain) == _PIECE // 4 * 3:
                    decoded += plain
                    continue
        rest += piece.encode("ascii").translate(_STANDARD, delete=b" \t\n\f\r")
        size = len(rest) if is_last else len(rest) // 4 * 4
        plain, rest = _unpadded(rest[:size], is_last=is_last), rest[size:]
        decoded += plain
    return bytes(decoded)


def _unpadded(data: bytes, *, is_last: bool) -> bytes:
    """Decode whole groups of four, the last of which may lack its padding."""
    if not is_last and b"=" in data:
        raise binascii.Error("padding inside of the text")
    data = data.rstrip(b"=")
    return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
