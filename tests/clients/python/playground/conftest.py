"""A playground before a server of the null engine, for all tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.clients.python.web.serving import http_server
from tests.e2e.server import Server

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
    with http_server(server, page=True) as url:
        yield url.removeprefix("http://")


@pytest.fixture
def page(site: str) -> Iterator[httpx.Client]:
    """What the page's scripts see."""
    origin = {"origin": f"http://{site}"}
    with httpx.Client(base_url=f"http://{site}", headers=origin, timeout=100) as client:
        yield client


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON lines of a stream."""
    return [json.loads(line) for line in response.iter_lines()]
