"""Bodies of requests, bounded."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from legato_client._errors import InvalidArgument
from legato_client.web.playground.tasks import invalid
from legato_client.web.server import backend_of

MAX_JSON_BYTES = 256 * 1024
MAX_PICTURE_BYTES = 32 * 1024 * 1024


async def read_object(request: Request) -> dict[str, Any]:
    """A JSON object; raises InvalidArgument, and as `Bodies.holding`."""
    async with backend_of(request).bodies.holding(request, MAX_JSON_BYTES) as data:
        return json_object(data)


def json_object(text: str | bytes | bytearray) -> dict[str, Any]:
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
