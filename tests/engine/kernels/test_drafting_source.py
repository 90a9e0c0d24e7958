"""The launches around a speculating forward compile, and stay in registers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from legato_engine.kernels.cuda import control_flow, draft_layer
from legato_engine.kernels.cuda.drafting import LOOKUP_SOURCE, SOURCE, RuleConstants
from legato_engine.kernels.cuda.module import compile_source
from legato_engine.speculative.policy import (
    NO_COSTS,
    AdaptiveBlockPolicy,
    FixedBlockPolicy,
    TokenBudgetPolicy,
)

from tests.engine.kernels.test_compiler import has_nvrtc
from tests.engine.kernels.test_decode_source import ARCHS, usages

pytestmark = pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "policy",
    [
        FixedBlockPolicy(1),
        FixedBlockPolicy(16),
        AdaptiveBlockPolicy(),
        TokenBudgetPolicy(NO_COSTS),
    ],
)
def test_drafting_compiles(policy, arch):
    """For every rule, and for the smallest and the largest block."""
    sizes = {"ROWS": 32, "VOCAB": 51200, "GROUP": 8}
    found = usages(compile_source(SOURCE, {**RuleConstants.of(policy).defines, **sizes}, arch))
    assert set(found) == {"allot_blocks", "place", "settle"}
    assert all(usage.stack <= 8 for usage in found.values())  # a barrier of diverged threads
    assert usages(compile_source(LOOKUP_SOURCE, {}, arch))["lookup"].stack == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_the_choice_of_a_graph_compiles(arch):
    """Without a header: the driver provides the function that sets a conditional node."""
    assert usages(compile_source(control_flow.SWITCH_SOURCE, {}, arch))["choose"].stack == 0


@pytest.mark.parametrize(
    ("device", "dtype", "kv_dtype"),
    [
        ("cpu", torch.bfloat16, torch.bfloat16),
        ("cuda", torch.float32, torch.float32),
        ("cuda", torch.bfloat16, torch.float8_e4m3fn),
    ],
)
def test_other_drafts_are_left_to_torch(device, dtype, kv_dtype):
    """Another device, other weights, keys and values that are not bf16, and a layer too wide."""
    sizes = draft_layer.DraftSizes(320, 1280, 5, 1536, 16, 64, 16)
    assert not draft_layer.supported(sizes, torch.device(device), dtype, kv_dtype)
    wide, bf16 = dataclasses.replace(sizes, inner=2760), torch.bfloat16
    assert not draft_layer.supported(wide, torch.device("cuda"), bf16, bf16)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("num_heads", "inner"), [(1, 64), (5, 1280), (16, 2048)])
def test_a_draft_compiles(num_heads, inner, arch):
    """For the shipped one, a small one and the widest; four of its rows fit shared memory."""
    dim = 64 * num_heads
    assert dim + inner <= draft_layer.WIDEST
    sizes = draft_layer.DraftSizes(
        dim, inner, num_heads, vocab_size=1536, page_size=16, max_pages=64, num_angles=16
    )
    found = usages(compile_source(draft_layer.SOURCE, sizes.defines, arch))
    assert set(found) == {f"draft_{name}" for name in ("join", "in", "attend", "out", "head")}
    assert all(usage.stack == 0 for usage in found.values())
