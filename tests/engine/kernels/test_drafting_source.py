"""The launches around a speculating forward compile, and stay in registers."""

from __future__ import annotations

import pytest
from legato_engine.kernels.cuda.compiler import compile_source
from legato_engine.kernels.cuda.drafting import LOOKUP_SOURCE, SOURCE

from tests.engine.kernels.test_compiler import has_nvrtc
from tests.engine.kernels.test_decode_source import ARCHS, usages

pytestmark = pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("block", [1, 16])
def test_drafting_compiles(block, arch):
    """For the smallest and the largest block."""
    found = usages(compile_source(SOURCE, {"BLOCK": block, "VOCAB": 51200}, arch))
    assert set(found) == {"place", "settle"}
    assert all(usage.stack == 0 for usage in found.values())
    assert usages(compile_source(LOOKUP_SOURCE, {}, arch))["lookup"].stack == 0
