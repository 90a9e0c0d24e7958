"""A running fake server for each test that asks for one."""

from __future__ import annotations

import pytest

from tests.clients.python.fake_server import FakeServer


@pytest.fixture
def server():
    """A scripted server."""
    with FakeServer() as fake:
        yield fake
