"""Fused attention is what float64 gives, and a sequence's bits are its own.

Shape legend: B sequences, T tokens, H heads, E head dim.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from legato_engine.device.cuda import CudaDevice
from legato_engine.kernels import ops, reference
from legato_engine.kernels.cuda import fused_attention
from legato_engine.kernels.cuda.capability import Kernels, runs

CUDA = torch.device("cuda", 0)
SIZES = [(729, 16, 72), (730, 32, 64), (129, 3, 72), (256, 2, 64), (768, 5, 72), (1000, 4, 64)]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not runs(Kernels.TOWER_ATTENTION, CUDA),
        reason="needs a GPU of compute capability 8.0 or later",
    ),
]

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True, params=["warpgroups", "warps"])
def _inference(request, monkeypatch):
    """By either kernel."""
    if request.param == "warps":
        monkeypatch.setattr(fused_attention, "has_warpgroups", lambda _: False)
    elif not fused_attention.has_warpgroups(CUDA):
        pytest.skip("needs Hopper's warpgroup products")
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def heads(count: int, tokens: int, num_heads: int, dim: int) -> Heads:
    """Views of one projection."""
    all_BT3HE = torch.randn(count, tokens, 3, num_heads, dim, device=CUDA).bfloat16()
    return all_BT3HE.select(2, 0), all_BT3HE.select(2, 1), all_BT3HE.select(2, 2)


def attended(*qkv_BTHE: torch.Tensor) -> torch.Tensor:
    """By the kernel, into memory that held no numbers."""
    trap = torch.full(qkv_BTHE[0].shape, torch.nan, device=CUDA, dtype=torch.bfloat16)
    del trap
    assert fused_attention.can_attend(*qkv_BTHE)
    return fused_attention.attend(*qkv_BTHE)


def exact(*qkv_BTHE: torch.Tensor) -> torch.Tensor:
    """In float64."""
    q_BHTE, k_BHTE, v_BHTE = (x.double().transpose(1, 2) for x in qkv_BTHE)
    scores_BHTT = q_BHTE @ k_BHTE.transpose(2, 3) / q_BHTE.shape[-1] ** 0.5
    return (scores_BHTT.softmax(-1) @ v_BHTE).transpose(1, 2)


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Root mean square of the difference over that of the truth."""
    return float((ours.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize(("tokens", "num_heads", "dim"), SIZES)
def test_it_errs_no_more_than_torch(tokens, num_heads, dim):
    """Against float64, on flat and on peaked scores; every row is written."""
    for count, gain in ((1, 1.0), (3, 4.0)):
        q_BTHE, k_BTHE, v_BTHE = heads(count, tokens, num_heads, dim)
        q_BTHE *= gain
        truth_BTHE = exact(q_BTHE, k_BTHE, v_BTHE)
        ours_BTHE = attended(q_BTHE, k_BTHE, v_BTHE)
        theirs_BTHE = reference.full_attention(q_BTHE, k_BTHE, v_BTHE)
        assert error(ours_BTHE, truth_BTHE) < 1.1 * error(theirs_BTHE, truth_BTHE)


@pytest.mark.parametrize(("tokens", "num_heads", "dim"), SIZES[:2])
def test_a_query_finds_its_key(tokens, num_heads, dim):
    """Where one score is far above the others, the result is that key's value, to the bit."""
    keys_TE = F.normalize(torch.randn(tokens, dim, device=CUDA), dim=-1) * 8 * dim**0.25
    order_T = torch.randperm(tokens, device=CUDA)
    q_BTHE, k_BTHE, v_BTHE = heads(2, tokens, num_heads, dim)
    q_BTHE.copy_(4 * keys_TE[order_T][:, None])
    k_BTHE.copy_(keys_TE[:, None])
    assert torch.equal(attended(q_BTHE, k_BTHE, v_BTHE), v_BTHE[:, order_T])


@pytest.mark.parametrize(("tokens", "num_heads", "dim"), SIZES[:2])
def test_bits_depend_on_nothing_but_the_sequence(tokens, num_heads, dim):
    """A sequence has the same bits alone, among 26, and after one of NaN."""
    q_BTHE, k_BTHE, v_BTHE = heads(26, tokens, num_heads, dim)
    whole_BTHE = attended(q_BTHE, k_BTHE, v_BTHE)
    for part in (slice(0, 1), slice(25, 26), slice(3, 12)):
        part_BTHE = attended(q_BTHE[part], k_BTHE[part], v_BTHE[part])
        assert torch.equal(part_BTHE, whole_BTHE[part])
    for broken in (q_BTHE, k_BTHE, v_BTHE):
        broken[1::2] = torch.nan
    assert torch.equal(attended(q_BTHE, k_BTHE, v_BTHE)[::2], whole_BTHE[::2])


def test_a_broken_head_breaks_no_other():
    """NaN stays in its head of its sequence, and is not lost there."""
    q_BTHE, k_BTHE, v_BTHE = heads(2, 729, 16, 72)
    whole_BTHE = attended(q_BTHE, k_BTHE, v_BTHE)
    v_BTHE[0, 728, 5] = torch.nan
    k_BTHE[1, 0, 15] = torch.nan
    broken_BTHE = attended(q_BTHE, k_BTHE, v_BTHE)
    expected_BTHE = whole_BTHE.clone()
    expected_BTHE[0, :, 5] = torch.nan
    expected_BTHE[1, :, 15] = torch.nan
    assert torch.equal(broken_BTHE.nan_to_num(7.0), expected_BTHE.nan_to_num(7.0))


def test_others_take_what_it_does_not():
    """Few tokens, other head sizes, dtypes and layouts go to torch, with the same result."""
    q_BTHE, k_BTHE, v_BTHE = heads(2, 729, 4, 72)
    by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q_BTHE, k_BTHE, v_BTHE)]
    for case in (
        heads(2, 96, 4, 72),  # no more than one block of keys
        heads(2, 729, 4, 80),
        tuple(x.float() for x in heads(1, 200, 2, 64)),
        by_head,
        (q_BTHE, k_BTHE, v_BTHE.contiguous()),
    ):
        assert not fused_attention.can_attend(*case)
        assert error(ops.full_attention(*case), exact(*case)) < 0.01


def test_a_captured_call_reads_its_inputs_anew():
    """A replay over other values gives what a call gives."""
    q_BTHE, k_BTHE, v_BTHE = heads(3, 729, 16, 72)
    out_BTHE = torch.empty(q_BTHE.shape, dtype=q_BTHE.dtype, device=CUDA)
    device = CudaDevice(0)

    def work() -> None:
        out_BTHE.copy_(ops.full_attention(q_BTHE, k_BTHE, v_BTHE))

    replay = device.capture(work)
    for _ in range(2):
        for x_BTHE in (q_BTHE, k_BTHE, v_BTHE):
            x_BTHE.copy_(torch.randn(x_BTHE.shape))
        torch.cuda.synchronize()
        device.compute.submit(replay)
        torch.cuda.synchronize()
        assert torch.equal(out_BTHE, fused_attention.attend(q_BTHE, k_BTHE, v_BTHE))
    device.close()
