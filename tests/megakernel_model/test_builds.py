"""The kernel's source compiles, for words, with values and with drafts."""

from __future__ import annotations

import importlib.resources

import pytest
import torch
from legato_engine.kernels.cuda.module import compile_source
from legato_engine.kernels.megakernel.kernel import (
    RING_STAGES,
    SOURCE,
    UNDER_WAY,
    BuildDrafts,
    BuildValues,
    shared_body,
)
from legato_engine.kernels.megakernel.program import defines
from legato_engine.kernels.megakernel.sizes import LEGATO_TINY
from legato_engine.speculative.policy import (
    NO_COSTS,
    AdaptiveBlockPolicy,
    BlockPolicy,
    FixedBlockPolicy,
    TokenBudgetPolicy,
)

from tests.engine.kernels.assembly import instructions, under_way
from tests.engine.kernels.test_compiler import has_nvrtc
from tests.engine.kernels.test_decode_source import usages

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed"),
]

_CPU = torch.device("cpu")
_VALUES = {
    "VALUES": 1,
    "INNER": 1280,
    "INNER_CHUNK": 320,
    "VALUE_PARTS": 1,
    "SCALAR": 5,
    "PAIR": 6,
    "END": 0,
    "SCALAR_BINS": 1024,
    "SCALAR_DIVISOR": 1024,
    "SCALAR_REACH": 2,
    "SCALAR_FEATURES": 256,
    "PAIR_BINS": 2048,
    "PAIR_REACH": 2,
    "PAIR_FEATURES": 256,
}
_IN_PARTS = {"INNER": 8192, "INNER_CHUNK": 512, "VALUE_PARTS": 4}
_WORDS = BuildValues(None, 8, _CPU).defines
_NO_DRAFTS = BuildDrafts(None, _CPU).defines
_POLICIES: tuple[BlockPolicy, ...] = (
    FixedBlockPolicy(7),
    AdaptiveBlockPolicy(),
    TokenBudgetPolicy(NO_COSTS),
)
BUILDS = [
    (1, _WORDS | _NO_DRAFTS),
    (1, _VALUES | _NO_DRAFTS),
    (2, _VALUES | _IN_PARTS | _NO_DRAFTS),
    *(
        (tiles, _WORDS | BuildDrafts(policy, _CPU).defines)
        for tiles, policy in zip((1, 2, 2), _POLICIES, strict=True)
    ),
    (2, _VALUES | _IN_PARTS | BuildDrafts(_POLICIES[-1], _CPU).defines),
]


@pytest.mark.parametrize(
    ("tiles", "kind"), BUILDS, ids=("words", "values", "parts", "fixed", "seed", "budget", "both")
)
def test_every_kind_of_build_compiles(tiles: int, kind: dict[str, int]) -> None:
    """With room for what a thread block shares; no stage is let go before it is read."""
    ring = RING_STAGES[tiles]
    constants = defines(LEGATO_TINY, ring, UNDER_WAY, tiles)
    constants |= kind | {"SHARED": shared_body(LEGATO_TINY, ring, 8 * tiles)}
    folder = importlib.resources.files("legato_engine.kernels.megakernel") / "sources"
    code = compile_source(SOURCE, constants, "sm_90a", folder=folder)
    assert set(usages(code)) == {"steps"}
    stages, early = under_way(instructions(code, "steps"))
    assert stages > 0
    assert not early
