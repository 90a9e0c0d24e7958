"""Several servers without a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.e2e.server import Server

NULL = ("--model", "null", "--null-step-ms", "5", "--drain-delay", "1.5")


@contextmanager
def servers(folder: Path, count: int = 2, *options: str) -> Iterator[list[Server]]:
    """They serve, and have logs of their own in folders below `folder`."""
    with ExitStack() as stack:
        started = []
        for number in range(count):
            own = folder / f"server-{number}"
            own.mkdir()
            started.append(stack.enter_context(Server(own, *NULL, *options)))
        yield started
