"""A residual sum and its norm, the tower that is made of them, and their kernels' source.

Shape legend: N crops, T tokens, P values of a patch, D width, H heads, E head dim, K inputs.
"""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from legato_engine.kernels import activations, ops, reference
from legato_engine.kernels.cuda import norm, quantise
from legato_engine.kernels.cuda.module import compile_source, sources
from legato_engine.layers.attention import Attention
from legato_engine.layers.linear import Linear
from legato_engine.layers.mlp import MLP
from legato_engine.models.moondream.presets import moondream2_config, tiny_random_config
from legato_engine.models.moondream.vision import VisionBlock
from legato_engine.models.moondream.weights import random_weights

CPU = torch.device("cpu")
LOAD = 16  # bytes of a load


@pytest.fixture(autouse=True)
def _inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def layer_norm(dim: int, dtype: torch.dtype) -> torch.nn.LayerNorm:
    """With weight and bias that are not its first ones."""
    layer = torch.nn.LayerNorm(dim, dtype=dtype)
    layer.weight.copy_(torch.randn(dim))
    layer.bias.copy_(torch.randn(dim))
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3])
def test_the_sum_and_its_norm_are_torchs(dtype, count):
    """On the CPU every bit is that of an addition and a norm; the second term may repeat."""
    layer = layer_norm(48, dtype)
    x_NTK, y_NTK = torch.randn(3, 7, 48).to(dtype), torch.randn(count, 7, 48).to(dtype)
    expected = x_NTK + y_NTK
    for add_norm in (ops.add_norm, ops.add_norm_quantised):
        assert torch.equal(add_norm(x_NTK.clone(), y_NTK, layer)[0], expected)
    assert torch.equal(ops.add_norm(x_NTK, y_NTK, layer)[1], layer(expected))


def test_the_norm_is_not_rounded_before_it_is_quantised():
    """The norm of a bf16 sum is that of float32, then quantised."""
    layer = layer_norm(48, torch.bfloat16)
    x_TK, y_TK = torch.randn(2, 5, 48).bfloat16()
    expected = reference.quantise(copy.deepcopy(layer).float()((x_TK + y_TK).float()))
    _, ours = ops.add_norm_quantised(x_TK, y_TK, layer)
    assert torch.equal(ours.values.float(), expected.values.float())
    assert torch.equal(ours.scale, expected.scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tower_adds_block_by_block(dtype):
    """On the CPU every bit is that of pre-norm blocks that add what they compute to their input."""
    config = tiny_random_config()
    vision = random_weights(config, 0, CPU, dtype).vision
    sizes = config.vision
    patches_NTP = torch.randn(2, sizes.num_tokens, 3 * sizes.patch_size**2).to(dtype)
    x_NTD = vision.patch_emb(patches_NTP) + vision.pos_emb
    for block in vision.blocks:
        assert isinstance(block, VisionBlock)
        attention = block.attn
        assert isinstance(attention, Attention)
        assert isinstance(block.mlp, MLP)
        x_NTD = x_NTD + attention.join(ops.full_attention(*attention.split(block.ln1(x_NTD))))
        hidden = activations.gelu(block.mlp.fc1(block.ln2(x_NTD)))
        x_NTD = x_NTD + block.mlp.fc2(hidden)
    assert torch.equal(vision.encode_patches(patches_NTP), vision.post_ln(x_NTD))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layers_gelu_is_the_tanh_form(dtype):
    """On the CPU every bit is that of the layer, then the tanh form of gelu."""
    linear = Linear(64, 48).to(dtype)
    x_TK = torch.randn(2, 9, 64).to(dtype) * 3
    assert torch.equal(linear.gelu(x_TK), activations.gelu(linear(x_TK)))


def test_heads_are_read_where_the_projection_leaves_them():
    """Queries, keys and values are views of one tensor, aligned as kernels of attention ask."""
    sizes = moondream2_config().vision
    attn = Attention(sizes.dim, sizes.num_heads).bfloat16()
    heads = attn.split(torch.randn(1, 3, sizes.dim).bfloat16())
    first = heads[0].untyped_storage().data_ptr()
    for index, each_NTHE in enumerate(heads):
        assert each_NTHE.untyped_storage().data_ptr() == first
        assert each_NTHE.storage_offset() == index * sizes.dim
        assert each_NTHE.stride(-1) == 1
        places = (each_NTHE.storage_offset(), *each_NTHE.stride()[:-1])
        assert all(place * each_NTHE.element_size() % LOAD == 0 for place in places)


def test_the_kernels_gelu_is_the_tanh_form():
    """By the constants in the source, x / (1 + 2^(x (LINEAR + CUBIC x^2))) is torch's gelu."""
    text = sources()[quantise.SOURCE]
    found = dict(re.findall(r"\b(LINEAR|CUBIC) = (-[0-9.]+)f", text))
    linear, cubic = float(found["LINEAR"]), float(found["CUBIC"])
    x = torch.linspace(-12, 12, 4801, dtype=torch.float64)
    ours = x / (1 + torch.exp2(x * (linear + cubic * x * x)))
    # the other form, 1 + tanh, cancels where x is negative
    torch.testing.assert_close(ours, F.gelu(x, approximate="tanh"), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90"])
def test_the_source_compiles_for_every_row(arch, tmp_path, monkeypatch):
    """NVRTC takes it for a warp's width and several warps'; without e4m3 one kernel is left."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="the kernel compiler is not installed")
    monkeypatch.setenv("LEGATO_KERNEL_CACHE", str(tmp_path))
    try:
        codes = [
            compile_source(norm.SOURCE, quantise.defines(dim), arch)
            for dim in (moondream2_config().vision.dim, 2048)
        ]
    except RuntimeError as error:
        pytest.skip(f"NVRTC's library is not installed: {error}")
    for code in codes:
        assert b"add_norm\0" in code
        assert (b"add_norm_quantise\0" in code) == (arch != "sm_80")
