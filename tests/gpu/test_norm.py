"""On a GPU: a residual sum and its norm are torch's, and so is a tower that is made of them.

Shape legend: N crops, T tokens, P values of a patch, K values of a row, H heads, E head dim.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from legato_engine.device.cuda import CudaDevice
from legato_engine.kernels import ops, reference
from legato_engine.kernels.cuda import fused_attention
from legato_engine.layers.attention import Attention
from legato_engine.layers.linear import Linear
from legato_engine.models.moondream.presets import moondream2_config, tiny_random_config
from legato_engine.models.moondream.weights import random_weights

from tests.gpu.quantised import DIMS, FLIPPED, assert_same, rows

CUDA = torch.device("cuda", 0)
ROUNDED = 2.0**-8  # half a step of bf16, relative to the smallest value that has it
COUNTS = (1, 7, 729)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


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


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="fused attention is made for Hopper",
)
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
