"""One server for most of the tests here; those that break theirs start their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from legato_client import Client

from tests.e2e.history import Answer, ask, jobs
from tests.e2e.server import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of legato-tiny; every test leaves it idle."""
    with Server(tmp_path_factory.mktemp("server")) as running:
        yield running
        running.settle()


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[Client]:
    """The client of this package, connected to that server."""
    with Client(server.address) as connected:
        yield connected


@pytest.fixture(scope="session")
def alone(client: Client) -> list[Answer]:
    """The answers to all `jobs`, asked one at a time."""
    return [ask(client, job) for job in jobs()]
