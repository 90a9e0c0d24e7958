"""The oracle's launch compiles, and stays in registers."""

import pytest
from legato_engine.kernels.cuda.module import compile_source

from benchmarks.speculation.oracle_kernel import FOLDER, SOURCE
from tests.engine.kernels.test_compiler import has_nvrtc
from tests.engine.kernels.test_decode_source import ARCHS, usages

pytestmark = pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")


@pytest.mark.parametrize("arch", ARCHS)
def test_it_compiles(arch):
    """From the benchmark's folder, with the kernels' headers."""
    assert usages(compile_source(SOURCE, {}, arch, folder=FOLDER))["oracle"].stack == 0
