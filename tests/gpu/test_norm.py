"""On a GPU: what lies between products - norms, residual sums, token rows - is torch's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from legato_engine.device.cuda import CudaDevice
from legato_engine.kernels import ops, reference
from legato_engine.kernels.cuda import fused_attention, token_rows
from legato_engine.kernels.cuda.attention import HEAD_DIMS
from legato_engine.kernels.pages import AttentionMetadata, LayerCache
from legato_engine.layers.attention import Attention
from legato_engine.layers.linear import Linear
from legato_engine.models.moondream.presets import moondream2_config, tiny_random_config
from legato_engine.models.moondream.weights import random_weights

from tests.gpu.inputs import DIMS, FLIPPED, HOPPER, assert_same, rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


CUDA = torch.device("cuda", 0)
ROUNDED = 2.0**-8  # half a step of bf16, relative to the smallest value that has it
COUNTS = (1, 7, 729)


@pytest.fixture(autouse=True)
def _inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def layer_norm(dim: int) -> torch.nn.LayerNorm:
    """With weight and bias that are not its first ones."""
    layer = torch.nn.LayerNorm(dim, device=CUDA, dtype=torch.bfloat16)
    layer.weight.copy_(torch.randn(dim))
    layer.bias.copy_(torch.randn(dim))
    return layer


@pytest.mark.parametrize("dim", DIMS)
def test_a_sum_and_its_norm_are_torchs(dim):
    """Every bit of the sum, which lies where x was; its norm but for roundings to a neighbour."""
    layer = layer_norm(dim)
    for count in COUNTS:
        x_TK, y_TK = rows(count, dim), rows(count, dim).flip(0).contiguous()
        expected_TK = x_TK + y_TK
        exact_TK = copy.deepcopy(layer).float()(expected_TK.float())
        sum_TK, normed_TK = ops.add_norm(x_TK, y_TK, layer)
        assert sum_TK.data_ptr() == x_TK.data_ptr()
        assert torch.equal(sum_TK, expected_TK)
        torch.testing.assert_close(normed_TK.float(), exact_TK, rtol=1.1 * ROUNDED, atol=1e-4)


@pytest.mark.parametrize("dim", DIMS)
def test_a_sum_of_three_and_its_norm_are_exact(dim):
    """The sum, rounded once, lies where its second term was; its norm but for roundings."""
    layer = layer_norm(dim)
    exact = copy.deepcopy(layer).float()
    for count in COUNTS:
        x_TK, y_TK = rows(count, dim), rows(count, dim).flip(0).contiguous()
        z_TK = rows(count, dim).roll(1, 0).contiguous()
        expected_TK = (x_TK.float() + y_TK.float() + z_TK.float()).bfloat16()
        before_TK = x_TK.clone()
        sum_TK, normed_TK = ops.add3_norm(x_TK, y_TK, z_TK, layer)
        assert sum_TK.data_ptr() == y_TK.data_ptr()
        assert torch.equal(x_TK, before_TK)
        assert torch.equal(sum_TK, expected_TK)
        exact_TK = exact(expected_TK.float())
        torch.testing.assert_close(normed_TK.float(), exact_TK, rtol=1.1 * ROUNDED, atol=1e-4)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.skipif(
    not torch.cuda.is_available() or not ops.can_multiply_e4m3(CUDA), reason="needs e4m3"
)
def test_a_sum_and_its_quantised_norm_are_the_reference(dim):
    """Every bit of the sum; its norm's values but for ties that fall the other way."""
    layer = layer_norm(dim)
    for count in COUNTS:
        x_TK, y_TK = rows(count, dim), rows(count, dim).flip(0).contiguous()
        expected_TK, expected = reference.add_norm_quantised(x_TK, y_TK, layer)
        sum_TK, ours = ops.add_norm_quantised(x_TK, y_TK, layer)
        assert torch.equal(sum_TK, expected_TK)
        assert_same(ours, expected, FLIPPED + 2 / (count * dim))


@pytest.mark.parametrize("dim", DIMS)
def test_without_a_second_term_there_is_the_norm_alone(dim):
    """The norm is written to `out`, and x is unchanged."""
    layer = layer_norm(dim)
    exact = copy.deepcopy(layer).float()
    for x_TK in (rows(729, dim), rows(1, dim), rows(7, dim + 1)[:, :dim]):
        before_TK, out_TK = x_TK.clone(), torch.empty_like(x_TK)
        sum_TK, normed_TK = ops.add_norm(x_TK, None, layer, out_TK)
        assert sum_TK is x_TK
        assert normed_TK.data_ptr() == out_TK.data_ptr()
        assert torch.equal(x_TK, before_TK)
        exact_TK = exact(x_TK.float())
        torch.testing.assert_close(out_TK.float(), exact_TK, rtol=1.1 * ROUNDED, atol=1e-4)


def test_the_second_term_repeats():
    """A term of one crop is added to each crop, and is not changed."""
    layer = layer_norm(1152)
    x_NTK, y_1TK = rows(3 * 29, 1152).view(3, 29, 1152), rows(29, 1152)[None]
    before_1TK = y_1TK.clone()
    expected_NTK = x_NTK + y_1TK
    sum_NTK, normed_NTK = ops.add_norm(x_NTK, y_1TK, layer)
    assert torch.equal(sum_NTK, expected_NTK)
    assert torch.equal(y_1TK, before_1TK)
    torch.testing.assert_close(normed_NTK, layer(expected_NTK), rtol=2 * ROUNDED, atol=1e-3)


def test_what_the_kernel_cannot_load_is_torchs():
    """Rows of another dtype or length, not contiguous or not aligned give torch's bits."""
    layer = layer_norm(1152)
    wide_TK = rows(5, 2304)[:, :1152]
    shifted_TK = rows(6, 1152).flatten()[1 : 1 + 5 * 1152].view(5, 1152)
    odd = torch.nn.LayerNorm(1153, device=CUDA, dtype=torch.bfloat16)
    for x_TK, each in (
        (rows(5, 1152).float(), copy.deepcopy(layer).float()),
        (wide_TK, layer),
        (shifted_TK, layer),
        (rows(5, 1153), odd),
    ):
        before_TK = x_TK.clone()
        sum_TK, normed_TK = ops.add_norm(x_TK, x_TK, each)
        assert torch.equal(sum_TK, before_TK + before_TK)
        assert torch.equal(normed_TK, each(before_TK + before_TK))


@pytest.mark.parametrize("count", [1, 2, 729])
def test_a_fused_gelu_is_the_tanh_form(count):
    """Whatever the number of rows, it is float32's gelu of the layer, rounded once or twice."""
    linear = Linear(1152, 4304).to(CUDA, torch.bfloat16)
    x_NTK = 3 * torch.randn(1, count, 1152, device=CUDA).bfloat16()
    ours = linear.gelu(x_NTK)
    exact = copy.deepcopy(linear).float()
    hidden = F.linear(x_NTK.float(), exact.weight, exact.bias)
    expected = F.gelu(hidden, approximate="tanh")
    assert ours.shape == (1, count, 4304)
    torch.testing.assert_close(ours.float(), expected, rtol=4 * ROUNDED, atol=4 * ROUNDED)


@HOPPER
def test_attention_is_fused_and_copies_nothing():
    """The tower's heads go to the kernel as they are, and its result to the projection as it is."""
    sizes = moondream2_config().vision
    attn = Attention(sizes.dim, sizes.num_heads).to(CUDA, torch.bfloat16)
    heads = attn.split(torch.randn(9, 729, sizes.dim, device=CUDA).bfloat16())
    assert fused_attention.can_attend(*heads)
    out_NTHE = ops.full_attention(*heads)
    assert out_NTHE.is_contiguous()


def test_the_tower_can_be_captured():
    """A captured tower gives the same features for new patches, and those of torch's operations."""
    config = tiny_random_config()
    vision = random_weights(config, 0, CUDA, torch.bfloat16).vision
    exact = copy.deepcopy(vision).float()
    sizes = config.vision
    patches_NTP = torch.zeros(3, sizes.num_tokens, 3 * sizes.patch_size**2, device=CUDA).bfloat16()
    out_NTK = torch.zeros_like(vision.encode_patches(patches_NTP))
    device = CudaDevice(0)

    def encode() -> None:
        out_NTK.copy_(vision.encode_patches(patches_NTP))

    replay = device.capture(encode)
    for _ in range(2):
        patches_NTP.copy_(torch.randn(patches_NTP.shape))
        torch.cuda.synchronize()
        device.compute.submit(replay)
        torch.cuda.synchronize()
        assert torch.equal(out_NTK, vision.encode_patches(patches_NTP))
        truth_NTK = exact.encode_patches(patches_NTP.float())
        assert (out_NTK.float() - truth_NTK).norm() < 0.03 * truth_NTK.norm()
    device.close()


# ---------------------------------------------------------------- token rows
# On a GPU: what lies between a text decoder's products is torch's, whatever the batch.
#
# Shape legend as in `kernels.ops`, but G heads of queries, keys and values, F inner width.

PAGE, CONTEXT = 16, 4096
HEADS = [(9, 3), (32, 8), (8, 8), (16, 2)]
"""Heads of queries, and of keys and values."""


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


@pytest.mark.parametrize(("heads", "head_dim"), [((16, 8), 128), ((4, 2), 16), ((6, 2), 64)])
@pytest.mark.parametrize("count", [1, 40])
def test_heads_are_normed_before_they_turn(heads, head_dim, count):
    """As by torch but for roundings to a neighbour; values, and what pages hold, are exact."""
    num_heads, num_kv = heads
    qkv_TGE = noise(count, num_heads + 2 * num_kv, head_dim)
    angle_T1R = torch.rand(count, 1, head_dim // 2, device=CUDA) * 6
    place_T = torch.randperm(8 * PAGE, device=CUDA)[:count]
    where = AttentionMetadata(angle_T1R.cos(), angle_T1R.sin(), place_T // PAGE, place_T % PAGE)
    norms = torch.nn.RMSNorm(head_dim, eps=1e-6), torch.nn.RMSNorm(head_dim, eps=1e-6)
    for norm in norms:
        norm.to(CUDA, torch.bfloat16).weight.copy_(torch.randn(head_dim))
    assert token_rows.can_norm(norms, head_dim // 2)
    caches = [noise(8, num_kv, PAGE, head_dim) for _ in range(2)]
    given_TGE = qkv_TGE.clone()
    q_THE, k_THE, v_THE = ops.rotate_and_cache(qkv_TGE, where, *caches, norms=norms)
    parts = given_TGE.split((num_heads, num_kv, num_kv), dim=1)
    for norm, found_THE, given_THE in zip(norms, (q_THE, k_THE), parts, strict=False):
        normed_THE = copy.deepcopy(norm).float()(given_THE.float())
        turned_THE = reference.rotate(normed_THE, where.cos_T1R, where.sin_T1R)
        assert error(found_THE, turned_THE.double()) < ROUNDED
    assert torch.equal(v_THE, parts[2])
    for cache_NHSE, new_THE in zip(caches, (k_THE, v_THE), strict=True):
        assert torch.equal(cache_NHSE[where.page_T, :, where.slot_T], new_THE)


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

    def __init__(self, heads: tuple[int, int], count: int, head_dim: int = 64) -> None:
        num_heads, self.num_kv = heads
        pages = CONTEXT // PAGE
        self.position_B = torch.randint(CONTEXT, (count,), device=CUDA)
        self.position_B[0] = CONTEXT - 1
        self.table_BM = torch.randperm(count * pages, device=CUDA).view(count, pages) + 1
        shape = count * pages + 1, self.num_kv, PAGE, head_dim
        self.cache = LayerCache(noise(*shape), noise(*shape), None)
        self.q_BHE = noise(count, num_heads + 2 * self.num_kv, head_dim)[:, :num_heads]

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


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("count", [1, 3, 17, 40])
def test_attention_is_as_exact_as_torchs(heads, count, head_dim):
    """Also where rows and their query heads take several launches."""
    rows = Rows(heads, count, head_dim)
    truth_BHE = rows.torchs(torch.float64)
    assert error(rows.attend(), truth_BHE) < 1.1 * error(rows.torchs(torch.bfloat16), truth_BHE)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", HEADS)
def test_a_row_has_the_same_bits_in_any_batch(heads, head_dim):
    rows = Rows(heads, 40, head_dim)
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
