"""In the assembly no stage of weights is let go while reads of it are under way.

The copy engine overwrites a stage as soon as all warps have arrived at its barrier, and nothing but
the values orders a warp's reads before its arrival. On a GPU a violation shows in some launches
only, and never on the emulated machine, where a read is over when the next instruction begins.
"""

from __future__ import annotations

import pytest
from legato_engine.kernels.cuda import module

from tests.engine.kernels.assembly import instructions, under_way
from tests.engine.kernels.test_compiler import has_nvrtc
from tests.engine.kernels.test_decode_source import KERNELS, forms

pytestmark = pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")

READERS = ["layer_maps.cu", "layer_boundary.cu", "head.cu", "value_bins.cu"]
DEPENDS = "(read & (gridDim.z - 1)) != 0"
"""What makes the arrival wait for values."""


def examined(source: str) -> dict[str, tuple[int, list[int]]]:
    """Every kernel of a source, of all its forms for Moondream 2."""
    return {
        f"{kernel}, {batch} tokens": under_way(instructions(code, kernel))
        for constants, batch in forms(source, "moondream2")
        for code in [module.compile_source(source, constants, "sm_90")]
        for kernel in KERNELS[source]
    }


@pytest.mark.parametrize("source", READERS)
def test_a_stage_is_let_go_when_its_values_are_there(source):
    """Stages of weights are found in every kernel, and none is let go before."""
    for kernel, (stages, early) in examined(source).items():
        assert stages > 0, kernel
        assert not early, kernel


def test_a_release_that_waits_for_nothing_is_seen(monkeypatch):
    """Without the values in it the compiler does put an arrival before what waits for reads."""
    texts = dict(module.sources())
    assert texts["stage_ring.cuh"].count(DEPENDS) == 1
    texts["stage_ring.cuh"] = texts["stage_ring.cuh"].replace(DEPENDS, "false")
    monkeypatch.setattr(module, "sources", lambda: texts)
    assert any(early for _, early in examined("layer_boundary.cu").values())
