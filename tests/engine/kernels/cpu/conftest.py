"""What tests of the CPU's kernels share."""

from __future__ import annotations

import pytest
import torch
from legato_engine.kernels.cpu.library import library as load


@pytest.fixture(scope="session")
def library():
    """The compiled library; machines that cannot have one have nothing to test."""
    found = load("auto")
    if found is None:
        pytest.skip("this machine has no library of kernels: no C++ compiler, or no AVX2")
    return found


@pytest.fixture(autouse=True)
def threads():
    """A test's own number of threads ends with it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
