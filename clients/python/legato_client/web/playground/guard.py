"""Who may speak to the playground, and what its page may do.

The process acts with its own credential, so it answers its own page only: another site that the
same browser shows must neither call it nor frame it.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "media-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_SAFE_METHODS = ("GET", "HEAD")
_OWN_SITES = ("same-origin", "none")


class Guard:
    """Refuses requests of other sites, and adds the page's policies to every answer.

    Browsers tell the site that a request comes from; programs do not. What is not a GET, and every
    websocket, must come from this host or from a program.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        problem = _problem(scope)
        if problem:
            await _refuse(problem, scope, receive, send)
            return

        async def send_with_policies(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-cache")
            await send(message)

        await self._app(scope, receive, send_with_policies)


def _problem(scope: Scope) -> str:
    """Why a request is refused; empty for one that is not."""
    headers = Headers(scope=scope)
    origin, host = headers.get("origin"), headers.get("host", "")
    is_foreign = origin is not None and urlsplit(origin).netloc.lower() != host.lower()
    if is_foreign or (headers.get("sec-fetch-site", "none") not in _OWN_SITES and _acts(scope)):
        return "requests of other sites are refused"
    return ""


def _acts(scope: Scope) -> bool:
    """Whether a request does more than show the page, which a link elsewhere may."""
    return scope["type"] == "websocket" or scope["method"] not in _SAFE_METHODS


async def _refuse(problem: str, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": problem})
    else:
        await PlainTextResponse(f"{problem}\n", 403)(scope, receive, send)
