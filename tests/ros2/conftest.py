"""The node on the stand-in for rclpy, before real servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server
from tests.ros2 import standin

standin.install()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that recognises shapes."""
    with Server(tmp_path_factory.mktemp("tiny")) as running:
        yield running.address


@pytest.fixture(scope="session")
def null(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server whose answers are scripted: two objects, at once."""
    options = ("--model", "null", "--null-objects", "2", "--null-step-ms", "1")
    with Server(tmp_path_factory.mktemp("null"), *options) as running:
        yield running.address
