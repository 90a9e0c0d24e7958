"""What tests on the emulated machine share."""

from __future__ import annotations

import pytest
from legato_engine.kernels.cuda import (
    adapters,
    attention,
    decoder,
    drafting,
    sampling,
    skinny_gemm,
    tau_decoder,
    value_heads,
)

from tests.emulator.build import compiler
from tests.emulator.module import EmulatedModule

PROCESSORS = 12


@pytest.fixture(autouse=True)
def single_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the engine compiles itself are emulated, on a GPU of a few multiprocessors."""
    of_single_steps = attention, decoder, decoder, decoder, sampling, value_heads
    for module in (*of_single_steps, adapters, drafting, tau_decoder, tau_decoder):
        monkeypatch.setattr(module, "Module", EmulatedModule)
    monkeypatch.setattr(skinny_gemm, "num_processors", lambda: PROCESSORS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a compiler there is nothing to emulate."""
    if compiler():
        return
    for item in items:
        if "tests/emulator/" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="needs a C++ compiler"))
