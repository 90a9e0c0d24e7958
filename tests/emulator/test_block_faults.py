"""Planted faults in captured kernels that hold all inputs.

Each is found by the emulated machine in a step that test_steps.py has with the sources as they are.
"""

from __future__ import annotations

import functools

import pytest
from legato_engine.kernels.cuda import decoder

from tests.emulator.module import EmulatedFault, EmulatedModule, Patch
from tests.emulator.small import CPU
from tests.emulator.test_steps import PARTS, plain
from tests.gpu import test_kernels
from tests.gpu.test_kernels import world_of

BATCH = 13
"""Two tiles, so that finishers let blocks pass; thread blocks of a cluster share the inputs."""
INEXACT = "errs"

_COUNT = "      if (index == 0 && token == 0) barrier_expect("
_EMPTY = "    barriers.wait_empty(block);\n"
_PASS = "      sums.skip(block, barriers);\n"
_STORE = (
    "    if (lane != rank && lane < SHARED) store_peer(moments + token, moment, begun, lane);\n"
)
FAULTS: dict[str, tuple[Patch, str]] = {
    "a finisher that does not let a block pass": (("block_map.cuh", _PASS, ""), "deadlock"),
    "moments that only one thread block has": (("norm_gemm.cuh", _STORE, ""), "deadlock"),
    "results before all moments are there": (
        ("norm_gemm.cuh", "  barrier_wait(begun, 0);\n", ""),
        INEXACT,
    ),
    "sums over those that are not taken yet": (
        ("block_map.cuh", _EMPTY, ""),
        f"{INEXACT}|deadlock",
    ),
    "products before their inputs are there": (
        ("block_map.cuh", "      if (block == 0) inputs.wait(chunk);\n", ""),
        INEXACT,
    ),
    "a chunk that each finisher counts": (
        ("stage_ring.cuh", _COUNT, "      if (token == 0) barrier_expect("),
        "more arrivals",
    ),
}
SOON = "a finisher that does not let a block pass"
"""Not slow."""


def found(monkeypatch: pytest.MonkeyPatch, *patches: Patch) -> str | None:
    """What tells of them in a step, if anything does."""
    patched = functools.partial(EmulatedModule, patches=patches)
    for module in (decoder, decoder):
        monkeypatch.setattr(module, "Module", patched)
    world = world_of(plain(PARTS), CPU)
    try:
        test_kernels.a_step_is_as_exact_as_torch(world, BATCH)
    except EmulatedFault as fault:
        return str(fault)
    except AssertionError:
        return INEXACT
    return None


@pytest.mark.parametrize(
    "name",
    [name if name == SOON else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS],
)
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    patch, says = FAULTS[name]
    told = found(monkeypatch, patch)
    assert told is not None
    assert any(part in told for part in says.split("|")), told
