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
from legato_client.web import caller, routes
from legato_client.web.bodies import Bodies
from legato_client.web.listen import Listen
from legato_client.web.server import Backend, HttpServer, make_app

from tests.clients.python.fake_server import FakeServer

PATIENCE = 60.0  # seconds
PICTURE = b"a picture"
DATA_URL = f"data:image/jpeg;base64,{base64.b64encode(PICTURE).decode()}"
HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"


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


@dataclasses.dataclass(frozen=True)
class Web:
    """A running HTTP server and the scripted server behind it."""

    url: str
    fake: FakeServer

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=PATIENCE)

    def get(self, path: str, **headers: str) -> Reply:
        return self.send("GET", path, b"", headers)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Reply:
        sent = {"content-type": "application/json", **(headers or {})}
        return self.send("POST", path, json.dumps(body).encode(), sent)

    def send(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> Reply:
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, found, response.read())


@contextlib.contextmanager
def serving(
    *, listen: Listen | None = None, bodies: Bodies | None = None, aliases: Mapping[str, str] = {}
) -> Iterator[Web]:
    """All routes of `legato http` for the length of the block."""
    with FakeServer() as fake:
        client = AsyncClient(fake.target, timeout=PATIENCE, token=caller.token)
        backend = Backend(client, PATIENCE, aliases, bodies or Bodies())
        listen = listen or Listen("127.0.0.1:0")
        started = threading.Event()
        server = HttpServer(
            make_app(routes.routes(), backend, listen), listen, lambda _url: started.set()
        )
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        assert started.wait(PATIENCE)
        try:
            yield Web(server.url, fake)
        finally:
            server.stop()
            thread.join(PATIENCE)
            assert not thread.is_alive()
