"""Fixtures of the benchmarks' tests."""

from __future__ import annotations

import pytest

from benchmarks import record


@pytest.fixture(autouse=True)
def _records_from_any_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests write records while their tree is edited; such records say `dirty`."""
    monkeypatch.setenv(record.ALLOW_DIRTY, "1")
