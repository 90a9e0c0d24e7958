"""A playground before a server of the null engine, for all tests of this folder."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from legato_client import AsyncClient
from legato_client.web.listen import Listen
from legato_client.web.playground.guard import Guard
from legato_client.web.playground.routes import routes
from legato_client.web.playground.snippets.connection import Connection
from legato_client.web.server import Backend, make_app
from starlette.middleware import Middleware

from tests.e2e.server import Server, until

STEP_MS = 2


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A token every two milliseconds, so that a stream is one."""
    options = ("--model", "null", "--null-step-ms", str(STEP_MS))
    with Server(tmp_path_factory.mktemp("null"), *options) as running:
        yield running


@pytest.fixture(scope="session")
def site(server: Server) -> Iterator[str]:
    """Where the page is, as HOST:PORT."""
    with serving(server.address) as address:
        yield address


@contextmanager
def serving(server: str) -> Iterator[str]:
    """A playground before a server; its HOST:PORT."""
    listen = Listen("127.0.0.1:0")
    backend = Backend(AsyncClient(server), timeout=100.0)
    app = make_app(routes(Connection(server)), backend, listen, [Middleware(Guard)])
    bound = listen.bind()
    process = uvicorn.Server(uvicorn.Config(app, lifespan="on", log_config=None))
    thread = threading.Thread(target=process.run, args=([bound],))
    thread.start()
    until(lambda: process.started)
    host, port = bound.getsockname()
    yield f"{host}:{port}"
    process.should_exit = True
    thread.join()


@pytest.fixture
def page(site: str) -> Iterator[httpx.Client]:
    """What the page's scripts see."""
    origin = {"origin": f"http://{site}"}
    with httpx.Client(base_url=f"http://{site}", headers=origin, timeout=100) as client:
        yield client


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON lines of a stream."""
    return [json.loads(line) for line in response.iter_lines()]
