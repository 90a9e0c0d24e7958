"""Request bodies, bounded before they are read, and images in data URLs.

Nothing is reserved before bytes arrive, and none are read before the Legato server has accepted the
caller's token.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import dataclasses
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import TypeVar

import msgspec
from starlette.requests import Request

from legato_client._grpc.channel import MAX_MESSAGE_BYTES
from legato_client.web.errors import RejectedRequest

BodyT = TypeVar("BodyT")

MAX_BODY_BYTES = MAX_MESSAGE_BYTES // 3 * 4 + 1024 * 1024
"""Size of the largest gRPC request's image in base64, and of the JSON around it."""

MAX_HELD_BYTES = 128 * 1024 * 1024
"""Memory limit of all bodies that are being read or answered."""

MAX_VALUES = 10_000
"""Opening brackets, commas, colons and strings of a JSON body."""

READ_TIMEOUT = 60.0  # seconds
SILENCE_TIMEOUT = 10.0  # seconds without a byte of a body
_SILENT = 1.0  # seconds after which a body gives its memory to others, if that is full
_MIN_RATE = 32 * 1024  # bytes per second: a slower body counts as silent for what it is behind
_SLICE = 4 * 1024  # bytes whose size is counted at once
_TURN = 32 * 1024  # bytes that one body may take before other work; smaller pieces do not wait
_LARGE = 256 * 1024  # bytes that take the event loop too long to parse

# Bytes of memory that a byte of the body becomes: itself and its text, then the image in it, the
# request to the server and gRPC's copy.
_PLAIN = 2.75
_WIDE = 8.0  # one character beyond ASCII makes four bytes of each, and a copy meanwhile
_VALUE_BYTES = 64  # memory counted for each of `MAX_VALUES`
_NO_MARKS = bytes(set(range(256)) - set(b"[{,:"))


@dataclasses.dataclass
class Bodies:
    """Reader of bodies with a memory limit, beyond which requests must retry later.

    `check` raises LegatoError unless the server accepts the caller's token. `each` is in bytes of
    one body, `together` in bytes of memory.
    """

    check: Callable[[], Awaitable[None]]
    each: int = MAX_BODY_BYTES
    together: int = MAX_HELD_BYTES
    held: int = 0
    _arriving: set[_Share] = dataclasses.field(default_factory=set, init=False)
    _turn: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock, init=False)
    """Or many large bodies would fill each round of the event loop."""

    async def make_room(self) -> bool:
        """End the body that has been silent for longest; return whether there was one."""
        now = time.monotonic()
        silent = [each for each in self._arriving if each.heard_at <= now - _SILENT]
        if silent:
            oldest = min(silent, key=lambda each: each.heard_at)
            self._arriving.discard(oldest)
            await oldest.end()
        return bool(silent)

    @contextlib.asynccontextmanager
    async def reading(
        self, request: Request, kind: type[BodyT], limit: int | None = None
    ) -> AsyncIterator[BodyT]:
        """Parse the body as `kind`; its memory is counted until the block ends.

        Raises RejectedRequest, and LegatoError if the server does not accept the caller's token.
        """
        _check_type(request)
        async with self._received(request, limit or self.each, JsonSize()) as data:
            body = await _parse(data, kind)
            with contextlib.suppress(BufferError):  # a raw field is a view of it
                data.clear()
            yield body

    @contextlib.asynccontextmanager
    async def holding(
        self, request: Request, limit: int, *, is_json: bool = False
    ) -> AsyncIterator[bytearray]:
        """Read a body of at most `limit` bytes; its memory is counted until the block ends.

        JSON counts as what it becomes parsed. Raises as `reading`, but for the type and form.
        """
        async with self._received(request, limit, JsonSize() if is_json else None) as data:
            yield data

    @contextlib.asynccontextmanager
    async def _received(
        self, request: Request, limit: int, size: JsonSize | None
    ) -> AsyncIterator[bytearray]:
        text = request.headers.get("content-length", "0")
        if text.isascii() and text.isdigit() and int(text[:20]) > limit:
            raise _too_large(limit)
        await self.check()
        data = bytearray()
        with _Share(self) as share:
            try:
                async with asyncio.timeout(READ_TIMEOUT) as share.timeout:
                    self._arriving.add(share)
                    async for chunk in _chunks(request):
                        if len(data) + len(chunk) > limit:
                            raise _too_large(limit)
                        heard_at, share.heard_at = share.heard_at, math.inf  # the turn is ours
                        async with self._turn if len(chunk) > _TURN else contextlib.nullcontext():
                            await _grow(share, size, chunk)
                            data += chunk
                        paid_until = heard_at + len(chunk) / _MIN_RATE
                        share.heard_at = min(time.monotonic(), paid_until)
            except TimeoutError:
                seconds = time.monotonic() - share.begun_at
                raise RejectedRequest(
                    f"the body did not arrive within {seconds:.0f} s",
                    status=HTTPStatus.REQUEST_TIMEOUT,
                    code="client_too_slow",
                ) from None
            finally:
                self._arriving.discard(share)
            yield data


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    """Yield the pieces of a body. Raises TimeoutError."""
    stream = request.stream()
    while True:
        async with asyncio.timeout(SILENCE_TIMEOUT):
            chunk = await anext(stream, None)
        if chunk is None:
            return
        yield chunk


class _Share:
    """The memory of one body, given back at the end of the block."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._held = 0
        self._ended = asyncio.Event()
        self.begun_at = self.heard_at = time.monotonic()
        self.timeout: asyncio.Timeout | None = None

    def __enter__(self) -> _Share:
        return self

    def __exit__(self, *_: object) -> None:
        self._bodies.held -= self._held
        assert self._bodies.held >= 0, "memory was given back twice"
        self._ended.set()

    async def end(self) -> None:
        """Let the body be late now."""
        assert self.timeout is not None, "it arrives"
        self.timeout.reschedule(asyncio.get_running_loop().time())
        await self._ended.wait()

    async def grow(self, size: float) -> None:
        num_bytes = round(size)
        if self._held + num_bytes > self._bodies.together:
            raise RejectedRequest(
                f"the body would take more than {self._bodies.together} bytes of memory",
                status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                code="body_too_large",
            )
        while self._bodies.held + num_bytes > self._bodies.together:
            if await self._bodies.make_room():
                continue
            raise RejectedRequest(
                "the bodies of other requests fill the memory for them",
                status=HTTPStatus.SERVICE_UNAVAILABLE,
                code="queue_full",
                retry_after=1.0,
            )
        self._held += num_bytes
        self._bodies.held += num_bytes


async def _grow(share: _Share, size: JsonSize | None, chunk: bytes) -> None:
    """Extend the count; yield to others after a turn, and after slices of many values."""
    if size is None:
        await share.grow(_PLAIN * len(chunk))
        return
    for at in range(0, len(chunk), _SLICE):
        num_values = size.num_values
        await share.grow(size.add(chunk[at : at + _SLICE]))
        if (at + _SLICE) % _TURN == 0 or size.num_values > num_values + _SLICE // 64:
            await asyncio.sleep(0)


class JsonSize:
    """The memory that a JSON text takes parsed, counted while it arrives and before it is parsed.

    It does not check the text: invalid JSON is counted somehow, and refused by the parser.
    """

    _OPEN = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
    _CODE_POINT = re.compile(rb"[^\\]*+(?:\\[^u][^\\]*+)*+\\u")  # no backslash before its own

    def __init__(self) -> None:
        self.num_values = 0
        self._in_string = False
        self._is_escaped = False  # the first byte to come
        self._is_wide = False
        self._num_plain = 0  # bytes of this string

    def add(self, chunk: bytes) -> float:
        """Count a piece; return the memory that it adds."""
        at, size, before = 0, _PLAIN * len(chunk), self.num_values
        while at < len(chunk):
            if self._in_string:
                end = self._end_of_string(chunk, at)
                size += self._widening(chunk[at:end])
            else:
                end = chunk.find(b'"', at) % (len(chunk) + 1)
                self.num_values += len(chunk[at:end].translate(None, _NO_MARKS))
            if end < len(chunk):
                self._in_string = not self._in_string
                self.num_values += self._in_string
                self._is_wide, self._num_plain = False, 0
            if self.num_values > MAX_VALUES:
                raise RejectedRequest(
                    f"the body has more than {MAX_VALUES} brackets, commas, colons and strings",
                    status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    code="body_too_large",
                )
            at = end + 1
        return size + _VALUE_BYTES * (self.num_values - before)

    def _end_of_string(self, chunk: bytes, start: int) -> int:
        """Return the index of the closing quote, or the length of the chunk."""
        if self._is_escaped:
            self._is_escaped = False
            self._is_wide = self._is_wide or chunk[start : start + 1] == b"u"
            start += 1
        end = chunk.find(b'"', start) % (len(chunk) + 1)
        if chunk.find(b"\\", start, end) < 0:
            return end
        found = self._OPEN.match(chunk, start)
        assert found is not None, "it matches nothing, too"
        end = found.end()
        self._is_wide = self._is_wide or self._CODE_POINT.match(chunk, start, end) is not None
        self._is_escaped = end < len(chunk) and chunk[end] == ord("\\")  # the last byte
        return len(chunk) if self._is_escaped else end

    def _widening(self, piece: bytes) -> float:
        """Return what a piece of a string adds to the size of plain text."""
        if self._is_wide or not piece.isascii():
            num_plain, self._num_plain = self._num_plain + len(piece), 0
            self._is_wide = True
            return (_WIDE - _PLAIN) * num_plain
        self._num_plain += len(piece)
        return 0.0


def _too_large(limit: int) -> RejectedRequest:
    return RejectedRequest(
        f"the body has more than {limit} bytes",
        status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        code="image_too_large",
    )


def _check_type(request: Request) -> None:
    """Require JSON, which a page of another origin cannot send unasked."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RejectedRequest(
            "send JSON, with the header Content-Type: application/json",
            status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        )


async def _parse(data: bytearray, kind: type[BodyT]) -> BodyT:
    try:
        if len(data) > _LARGE:
            return await asyncio.to_thread(msgspec.json.decode, data, type=kind)
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        message, field = explained(str(error))
        raise RejectedRequest(message, field=field) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RejectedRequest(_not_utf8(data) or f"{error}", code="invalid_json") from None
    except RecursionError:
        raise RejectedRequest("the body is nested too deeply", code="invalid_json") from None


_PLACE = re.compile(r"(?P<what>.*) - at `\$\.?(?P<place>[^`]*)`", re.DOTALL)
_FIELD = re.compile(r"Object (?:contains unknown|missing required) field `(?P<name>[^`]*)`")


def explained(text: str) -> tuple[str, str | None]:
    """Return the message and the body's member: msgspec has both in one text only."""
    found = _PLACE.fullmatch(text)
    what, place = (found["what"], found["place"]) if found else (text, "")
    if named := _FIELD.fullmatch(what):
        place = f"{place}.{named['name']}" if place else named["name"]
    return text, place or None


def _not_utf8(data: bytearray) -> str:
    """Say where the body is not UTF-8 if it is not; Windows shells send ISO 8859-1 by default."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is 0x{data[error.start]:02x}"
        return f"the body is not UTF-8 ({byte}): encode it, and say charset=utf-8"
    return ""


# ---------------------------------------------------------------- images

# Images in JSON are data URLs; nothing is fetched.

_LONGEST_HEAD = 256  # characters before the comma
_PIECE = 256 * 1024  # characters, whole groups of four; no other thread runs meanwhile
_BASE64 = re.compile(r"; *base64 *$", re.IGNORECASE)
_STANDARD = bytes.maketrans(b"-_", b"+/")
_ESCAPES = [
    (b"%" + digits, bytes.fromhex(digits.decode()))
    for digits in b"2B 2b 2F 2f 3D 3d 20 09 0A 0a 0D 0d".split()
]
"""Characters that encoders escape: base64's signs and whitespace."""


async def decoded(url: str, field: str) -> bytes:
    """Decode a data URL in base64 as browsers do.

    Line breaks and other whitespace, absent padding, the URL-safe alphabet and percent-encoded
    characters of base64 are accepted; a place elsewhere is not.
    """
    url = url.strip()
    head, comma = url[:_LONGEST_HEAD].partition(",")[:2]
    scheme = head.partition(":")[0].lower()
    if scheme in ("http", "https"):
        raise RejectedRequest(
            "no URL is fetched: send the image itself, as data:image/jpeg;base64,...",
            field=field,
        )
    if scheme != "data" or not comma or not _BASE64.search(head):
        raise RejectedRequest("an image is a data URL: data:image/jpeg;base64,...", field=field)
    try:
        if len(url) > _LARGE:
            return await asyncio.to_thread(_decode, url, len(head) + 1)
        return _decode(url, len(head) + 1)
    except (binascii.Error, ValueError):
        raise RejectedRequest("the data URL is not valid base64", field=field) from None


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
    """Decode whole groups of four; the last one may lack its padding."""
    if not is_last and b"=" in data:
        raise binascii.Error("padding inside of the text")
    data = data.rstrip(b"=")
    return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
