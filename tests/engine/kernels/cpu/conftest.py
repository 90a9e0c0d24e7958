"""What tests of the CPU's kernels share."""

from __future__ import annotations

import pytest
import torch
from legato_engine.kernels.cache import cache_folder, store
from legato_engine.kernels.cpu import compiler
from legato_engine.kernels.cpu.library import Library
from legato_engine.kernels.cpu.library import library as load


@pytest.fixture(scope="session")
def library():
    """The compiled library; machines that cannot have one have nothing to test."""
    found = load("auto")
    if found is None:
        pytest.skip("this machine has no library of kernels: no C++ compiler, or no AVX2")
    return found


@pytest.fixture(scope="session")
def avx2_library(library):
    """The same compiled for any processor with AVX2, where this one has more; cached likewise."""
    if not library.instructions.startswith("AVX-512"):
        pytest.skip(f"compares with AVX-512; this machine's library has {library.instructions}")
    options = *compiler._FLAGS, *compiler._X86.built[-1].options
    key = compiler._key(compiler._compiler(), options, compiler.sources())
    file = cache_folder() / f"{key}.so"
    if not file.is_file():
        store(file, compiler._compile(compiler._compiler(), options, compiler.sources()))
    made = Library(str(file))
    assert made.instructions == "AVX2"
    return made


@pytest.fixture(autouse=True)
def threads():
    """A test's own number of threads ends with it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
