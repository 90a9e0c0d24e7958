"""Who may speak to the playground, and what its page may do.

The process acts with its own credential, so it answers its own page only: another site that the
same browser shows must neither call it nor frame it.
"""

from __future__ import annotations

from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from legato_client.web.errors import Refused, response_of

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
_FOREIGN = "requests of other sites are refused"


class Guard:
    """Refuses requests of other sites, and adds the page's policies to every answer.

    Browsers tell the site that a request comes from; programs do not. All but a link that is
    followed must come from this host or from a program.
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
    origin = headers.get("origin")
    if origin is not None and _host_of(origin) != headers.get("host", "").lower():
        return _FOREIGN
    if headers.get("sec-fetch-site", "none") in _OWN_SITES or _is_followed_link(scope, headers):
        return ""
    return _FOREIGN


def _is_followed_link(scope: Scope, headers: Headers) -> bool:
    """Of another site to the page, which then is shown to its own user only."""
    if scope["type"] == "websocket":
        return False
    return scope["method"] in _SAFE_METHODS and headers.get("sec-fetch-mode") == "navigate"


def _host_of(origin: str) -> str:
    """Empty for what is no origin, as `null`."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


async def _refuse(problem: str, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": problem})
    else:
        refusal = Refused(problem, status=HTTPStatus.FORBIDDEN, code="forbidden")
        await response_of(refusal)(scope, receive, send)
