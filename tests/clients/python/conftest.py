"""A running fake server for each test that asks for one, and both faces of the client."""

from __future__ import annotations

import functools

import pytest

from tests.clients.python.face import Face, session_of
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


@pytest.fixture(params=["sync", "async"])
def connect(request, server):
    """Opens a session of either face; whatever it did, it did by the contract."""
    yield functools.partial(session_of, request.param, server.target)
    assert not [each.violations for each in server.sessions.conversations if each.violations]
