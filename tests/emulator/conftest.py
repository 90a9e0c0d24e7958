"""What tests on the emulated machine share."""

from __future__ import annotations

import pytest
from legato_engine.kernels.cuda import (
    adapters,
    attention,
    capability,
    decoder,
    drafting,
    sampling,
    skinny_gemm,
    tau_decoder,
    value_heads,
)
from legato_engine.kernels.cuda.capability import Gpu

from tests.emulator.module import EmulatedModule, compiler

PROCESSORS = 12
PORTABLE = [(8, 6), pytest.param((8, 0), marks=pytest.mark.slow)]
"""Compute capabilities of GPUs before Hopper, with the least shared memory and with more."""


@pytest.fixture(autouse=True)
def single_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the engine compiles itself are emulated, on a GPU of a few multiprocessors."""
    of_single_steps = attention, decoder, decoder, decoder, sampling, value_heads
    for module in (*of_single_steps, adapters, drafting, tau_decoder, tau_decoder):
        monkeypatch.setattr(module, "Module", EmulatedModule)
    monkeypatch.setattr(skinny_gemm, "Module", EmulatedModule)
    monkeypatch.setattr(skinny_gemm, "num_processors", lambda: PROCESSORS)


@pytest.fixture(params=PORTABLE, ids=str)
def portable_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A GPU without bulk copies, clusters and overlapping launches."""
    gpu = Gpu(request.param)
    monkeypatch.setattr(capability, "current_gpu", lambda: gpu)
    return gpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a compiler there is nothing to emulate."""
    if compiler():
        return
    for item in items:
        if "tests/emulator/" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="needs a C++ compiler"))
