"""What tests on the emulated machine share."""

from __future__ import annotations

import shutil

import pytest
from legato_engine.kernels.cuda import sampling, value_heads

from tests.emulator.module import EmulatedModule


@pytest.fixture(autouse=True)
def single_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of single steps that results are compared with are emulated too."""
    for module in (sampling, value_heads):
        monkeypatch.setattr(module, "Module", EmulatedModule)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a compiler there is nothing to emulate."""
    if shutil.which("g++"):
        return
    for item in items:
        if "tests/emulator/" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="needs g++"))
