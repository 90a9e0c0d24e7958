"""One server for all programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server of legato-tiny, which must hold nothing at the end."""
    with Server(tmp_path_factory.mktemp("conformance")) as running:
        yield running
        running.settle()
