"""Fixtures of the benchmarks' tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from benchmarks import record


@pytest.fixture(autouse=True)
def _records_from_any_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests write records while their tree is edited; such records say `dirty`."""
    monkeypatch.setenv(record.ALLOW_DIRTY, "1")


@pytest.fixture(autouse=True)
def _usual_collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what benchmarks ask of the garbage collector.

    Objects of the whole run stay frozen: else all its later collections take a second each.
    """
    threshold = gc.get_threshold()
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    yield
    gc.set_threshold(*threshold)
