"""A running fake server for each test that asks for one, and both faces of the client."""

from __future__ import annotations

import pytest

from tests.clients.python.face import Face
from tests.clients.python.fake_server import FakeServer


@pytest.fixture
def server():
    """A scripted server."""
    with FakeServer() as fake:
        yield fake


@pytest.fixture(params=["sync", "async"])
def client(request, server):
    """Either face, connected to the scripted server."""
    return Face(request.param, server.target, 20.0)
