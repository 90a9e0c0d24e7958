"""Bodies of requests, bounded."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from legato_client._errors import InvalidArgument, ResourceExhausted
from legato_client.web.playground.tasks import invalid

MAX_JSON_BYTES = 256 * 1024
MAX_PICTURE_BYTES = 32 * 1024 * 1024


async def read(request: Request, limit: int) -> bytes:
    """The body; raises ResourceExhausted as soon as it is longer than `limit` bytes."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise ResourceExhausted(
                f"the playground takes at most {limit} bytes", metadata={"limit": str(limit)}
            )
    return bytes(body)


async def read_object(request: Request) -> dict[str, Any]:
    """A JSON object; raises InvalidArgument, and as `read`."""
    return json_object(await read(request, MAX_JSON_BYTES))


def json_object(text: str | bytes) -> dict[str, Any]:
    """Raises InvalidArgument."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidArgument("the request is not JSON") from None
    if not isinstance(value, dict):
        raise InvalidArgument("the request is not a JSON object")
    return value


def text_of(body: dict[str, Any], key: str) -> str | None:
    """A text or nothing; raises InvalidArgument."""
    value = body.get(key)
    if value is None or isinstance(value, str):
        return value
    raise invalid(key, "must be a text")
