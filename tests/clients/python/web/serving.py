"""The HTTP routes in front of a scripted server, on loopback, and plain requests to them."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from legato_client import AsyncClient
from legato_client.web import mcp_server, openapi
from legato_client.web import server as caller
from legato_client.web.connections import ConnectionLimits
from legato_client.web.listen import Listen
from legato_client.web.mcp_server import ImageSources
from legato_client.web.playground import routes as playground
from legato_client.web.playground.routes import Guard
from legato_client.web.playground.snippets import Connection
from legato_client.web.server import Backend, HttpServer
from starlette.middleware import Middleware

from tests.clients.python.fake_server import FakeServer

PATIENCE = 60.0  # seconds
IMAGE = b"an image"
HELLO: Any = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"


def data_url(image: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"


DATA_URL = data_url(IMAGE)


@dataclasses.dataclass(frozen=True)
class Reply:
    """An answer of HTTP; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The documents of server-sent events, `[DONE]` left out."""
        found = [each.removeprefix("data: ") for each in self.body.decode().split("\n\n") if each]
        return [json.loads(each) for each in found if each != "[DONE]"]


def connect(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)


def send(url: str, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
    with contextlib.closing(connect(url)) as connection:
        connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, found, response.read())


def post(url: str, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Reply:
    """A document as JSON."""
    sent = {"content-type": "application/json", **(headers or {})}
    return send(url, "POST", path, json.dumps(body).encode(), sent)


@dataclasses.dataclass(frozen=True)
class Web:
    """A running HTTP server and the scripted server behind it."""

    url: str
    fake: FakeServer

    def get(self, path: str) -> Reply:
        return self.send("GET", path, b"", {})

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Reply:
        return post(self.url, path, body, headers)

    def send(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        return send(self.url, method, path, body, headers)


@contextlib.contextmanager
def http_server(
    target: str,
    *,
    listen: Listen | None = None,
    aliases: Mapping[str, str] | None = None,
    limits: ConnectionLimits | None = None,
    page: bool = False,
    tools: ImageSources | None = None,
) -> Iterator[str]:
    """The URL of `legato http`, or of the playground, before `target` for the length of the block.

    The playground has the routes of `legato http`, too. With `tools` it is that of `legato mcp`.
    """
    backend = Backend.of(
        lambda: AsyncClient(target, timeout=PATIENCE, token=caller.token), PATIENCE, aliases
    )
    listen = listen or Listen("127.0.0.1:0")
    started = threading.Event()
    served = playground.routes(Connection(target)) if page else openapi.routes()
    if tools is not None:
        served = [mcp_server.route(mcp_server.ToolServer(backend, tools), backend, listen)]
    middleware = [Middleware(Guard)] if page else ()
    server = HttpServer(served, backend, listen, lambda _url: started.set(), middleware, limits)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        assert started.wait(PATIENCE)
        yield server.url
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[Web]:
    """The same in front of a scripted server, whose `requests` lack the checks of tokens."""
    with FakeServer() as fake, http_server(fake.target, **options) as url:
        fake.unrecorded.add("GetServerInfo")
        yield Web(url, fake)
