"""On a GPU: what lies between a text decoder's products is torch's, whatever the batch.

Shape legend as in `kernels.ops`, but G heads of queries, keys and values, F inner width.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from legato_engine.kernels import ops, reference
from legato_engine.kernels.cuda import token_rows
from legato_engine.kernels.pages import AttentionMetadata, LayerCache

CUDA = torch.device("cuda", 0)
PAGE, CONTEXT = 16, 4096
ROUNDED = 2.0**-8
HEADS = [(9, 3), (32, 8), (8, 8), (16, 2)]
"""Heads of queries, and of keys and values."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=CUDA).bfloat16()


@pytest.mark.parametrize(
    ("heads", "head_dim", "half"),
    [(h, 64, 32) for h in HEADS] + [((16, 8), 128, 64), ((4, 4), 80, 16)],
)
@pytest.mark.parametrize("count", [1, 5, 40])
def test_rotation_and_its_write_to_pages_have_torchs_bits(heads, head_dim, half, count):
    """Queries, keys, and every slot of the caches; others stay as they are."""
    num_heads, num_kv = heads
    qkv_TGE = noise(count, num_heads + 2 * num_kv, head_dim)
    angle_T1R = torch.rand(count, 1, half, device=CUDA) * 6
    place_T = torch.randperm(8 * PAGE, device=CUDA)[:count]
    where = AttentionMetadata(angle_T1R.cos(), angle_T1R.sin(), place_T // PAGE, place_T % PAGE)
    caches = [noise(8, num_kv, PAGE, head_dim) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    assert token_rows.can_rotate(qkv_TGE, where.cos_T1R, caches[0])
    turned_TGE = reference.rotate(qkv_TGE[:, :-num_kv], where.cos_T1R, where.sin_T1R)
    values_THE = qkv_TGE[:, -num_kv:].clone()
    expected[0][where.page_T, :, where.slot_T] = turned_TGE[:, num_heads:]
    expected[1][where.page_T, :, where.slot_T] = values_THE
    q_THE, k_THE, v_THE = ops.rotate_and_cache(qkv_TGE, where, *caches)
    assert torch.equal(q_THE, turned_TGE[:, :num_heads])
    assert torch.equal(k_THE, turned_TGE[:, num_heads:])
    assert torch.equal(v_THE, values_THE)
    assert all(map(torch.equal, caches, expected))


@pytest.mark.parametrize(("rows", "inner"), [(1, 1536), (7, 8), (300, 8192)])
def test_the_gate_is_a_silu(rows, inner):
    """Within one rounding of float64."""
    both_T2F = noise(rows, 2 * inner) * 4
    assert token_rows.can_gate(both_T2F)
    gate_TF, up_TF = both_T2F.double().chunk(2, dim=-1)
    exact_TF = F.silu(gate_TF) * up_TF
    torch.testing.assert_close(ops.gate(both_T2F).double(), exact_TF, rtol=1.1 * ROUNDED, atol=1e-6)


@pytest.mark.parametrize("dim", [64, 576, 2048, 4096])
def test_a_sum_and_its_rms_norm_are_torchs(dim):
    """Every bit of the sum; its norm but for roundings to a neighbour; without a term x stays."""
    norm = torch.nn.RMSNorm(dim, eps=1e-5, device=CUDA, dtype=torch.bfloat16)
    norm.weight.copy_(torch.randn(dim))
    exact = copy.deepcopy(norm).float()
    for count in (1, 9, 300):
        x_TK, y_TK = noise(count, dim), noise(count, dim)
        for term_TK in (None, y_TK):
            expected_TK = x_TK.clone() if term_TK is None else x_TK + term_TK
            sum_TK, normed_TK = ops.add_rms_norm(x_TK, term_TK, norm)
            assert torch.equal(sum_TK, expected_TK)
            wanted_TK = exact(expected_TK.float())
            torch.testing.assert_close(normed_TK.float(), wanted_TK, rtol=1.1 * ROUNDED, atol=1e-5)


class Rows:
    """Rows at random positions, with pages in random order, and their queries within qkv."""

    def __init__(self, heads: tuple[int, int], count: int) -> None:
        num_heads, self.num_kv = heads
        pages = CONTEXT // PAGE
        self.position_B = torch.randint(CONTEXT, (count,), device=CUDA)
        self.position_B[0] = CONTEXT - 1
        self.table_BM = torch.randperm(count * pages, device=CUDA).view(count, pages) + 1
        shape = count * pages + 1, self.num_kv, PAGE, 64
        self.cache = LayerCache(noise(*shape), noise(*shape), None)
        self.q_BHE = noise(count, num_heads + 2 * self.num_kv, 64)[:, :num_heads]

    def attend(self, rows: slice = slice(None)) -> torch.Tensor:
        table_BM, q_BHE = self.table_BM[rows], self.q_BHE[rows]
        assert token_rows.can_attend(table_BM, self.cache, q_BHE)
        return ops.step_attention(self.position_B[rows], table_BM, self.cache)(q_BHE, self.cache)

    def torchs(self, dtype: torch.dtype) -> torch.Tensor:
        cache = LayerCache(self.cache.k_NHSE.to(dtype), self.cache.v_NHSE.to(dtype), None)
        return reference.decode_attention_padded(
            self.q_BHE.to(dtype), cache, self.position_B, self.table_BM
        )


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("count", [1, 3, 17, 40])
def test_attention_is_as_exact_as_torchs(heads, count):
    """Also where rows and their query heads take several launches."""
    rows = Rows(heads, count)
    truth_BHE = rows.torchs(torch.float64)
    assert error(rows.attend(), truth_BHE) < 1.1 * error(rows.torchs(torch.bfloat16), truth_BHE)


@pytest.mark.parametrize("heads", HEADS)
def test_a_row_has_the_same_bits_in_any_batch(heads):
    rows = Rows(heads, 40)
    together_BHE = rows.attend()
    for first, count in ((0, 1), (7, 1), (5, 9), (39, 1)):
        part = slice(first, first + count)
        assert torch.equal(rows.attend(part), together_BHE[part])


def test_padding_is_finite_and_disturbs_no_row():
    """A row on the scratch page, which may hold NaN."""
    rows = Rows((9, 3), 12)
    expected_BHE = rows.attend()
    idle = [0, 4, 5, 11]
    rows.cache.k_NHSE[0], rows.cache.v_NHSE[0] = torch.nan, torch.nan
    rows.table_BM[idle], rows.position_B[idle] = 0, 0
    out_BHE = rows.attend()
    assert out_BHE.isfinite().all()
    kept = [index for index in range(12) if index not in idle]
    assert torch.equal(out_BHE[kept], expected_BHE[kept])


def test_a_step_can_be_captured():
    """A replay reads positions and pages anew."""
    rows = Rows((9, 3), 16)
    rows.attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_BHE = rows.attend()
    rows.position_B.copy_(torch.randint(CONTEXT, (16,), device=CUDA))
    rows.table_BM.copy_(rows.table_BM.flip(0))
    graph.replay()
    assert torch.equal(out_BHE, rows.attend())
