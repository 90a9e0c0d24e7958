"""Bodies of requests: bounded before they are read, all of them together too."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import TypeVar

import msgspec
from starlette.requests import Request

from legato_client._transport.channel import MAX_MESSAGE_BYTES
from legato_client.web.errors import Refused

BodyT = TypeVar("BodyT")

MAX_BODY_BYTES = MAX_MESSAGE_BYTES // 3 * 4 + 1024 * 1024
"""A picture of the largest request of gRPC in base64, and what surrounds it."""

MAX_HELD_BYTES = 8 * MAX_BODY_BYTES
"""Of all bodies that are being read or answered."""

READ_TIMEOUT = 60.0  # seconds
_LARGE = 256 * 1024  # bytes that take the event loop too long to parse


class Bodies:
    """Reads bodies; their sum stays below a bound, beyond which requests are to come back later."""

    def __init__(self, *, each: int = MAX_BODY_BYTES, together: int = MAX_HELD_BYTES) -> None:
        self._each = each
        self._together = together
        self._held = 0

    @contextlib.asynccontextmanager
    async def reading(self, request: Request, kind: type[BodyT]) -> AsyncIterator[BodyT]:
        """The body as a value of `kind`, whose bytes are counted until the block ends.

        Raises:
            Refused: it is too large, too slow, of another type of content, or not of this form.
        """
        _check_type(request)
        declared = self._declared(request)
        with contextlib.ExitStack() as taken:
            self._take(declared, taken)
            data = await self._read(request, declared, taken)
            yield await _parse(data, kind)

    def _declared(self, request: Request) -> int:
        """What the header says, at most what one body may have."""
        text = request.headers.get("content-length", "0")
        size = int(text) if text.isascii() and text.isdigit() else 0
        if size > self._each:
            raise self._too_large()
        return size

    async def _read(
        self, request: Request, declared: int, taken: contextlib.ExitStack
    ) -> bytearray:
        data = bytearray()
        try:
            async with asyncio.timeout(READ_TIMEOUT):
                async for chunk in request.stream():
                    if len(data) + len(chunk) > self._each:
                        raise self._too_large()
                    self._take(max(0, len(data) + len(chunk) - max(declared, len(data))), taken)
                    data += chunk
        except TimeoutError:
            raise Refused(
                f"the body did not arrive within {READ_TIMEOUT:g} s",
                status=HTTPStatus.REQUEST_TIMEOUT,
                code="client_too_slow",
            ) from None
        return data

    def _take(self, num_bytes: int, taken: contextlib.ExitStack) -> None:
        if self._held + num_bytes > self._together:
            raise Refused(
                "the bodies of other requests fill the memory for them",
                status=HTTPStatus.SERVICE_UNAVAILABLE,
                code="queue_full",
                retry_after=1.0,
            )
        self._held += num_bytes
        taken.callback(self._give, num_bytes)

    def _give(self, num_bytes: int) -> None:
        self._held -= num_bytes
        assert self._held >= 0, "bytes were given back twice"

    def _too_large(self) -> Refused:
        return Refused(
            f"the body has more than {self._each} bytes",
            status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            code="image_too_large",
        )


def _check_type(request: Request) -> None:
    """A page of another origin cannot send JSON unasked, so this also keeps such pages out."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(
            "send JSON, with the header Content-Type: application/json",
            status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        )


async def _parse(data: bytearray, kind: type[BodyT]) -> BodyT:
    try:
        if len(data) > _LARGE:
            return await asyncio.to_thread(msgspec.json.decode, data, type=kind)
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:  # its text names the field
        raise Refused(f"{error}") from None
    except RecursionError:
        raise Refused("the body is nested too deeply") from None
