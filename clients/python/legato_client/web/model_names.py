"""Names of models in requests: NAME, or NAME/ADAPTER for a fine-tune."""

from __future__ import annotations

from starlette.requests import Request

from legato_client._values.tasks import Options
from legato_client.web.server import backend_of


def options_of(request: Request, model: str | None, *, top_logprobs: int | None = None) -> Options:
    """An alias stands for the whole name; without a name the server's default model answers."""
    given = model or ""
    name, _, adapter = backend_of(request).aliases.get(given, given).partition("/")
    return Options(
        request_id=request.headers.get("x-request-id", ""),
        model=name,
        adapter=adapter,
        top_logprobs=top_logprobs,
    )
