"""Layers that multiply in e4m3, by emulation; and their kernels' source.

Shape legend: T rows, K inputs, O outputs of a layer.
"""

from __future__ import annotations

import copy

import pytest
import torch
from legato_engine.errors import InvalidField
from legato_engine.kernels import activations, ops, reference
from legato_engine.kernels.cuda import quantise
from legato_engine.kernels.cuda.module import compile_source
from legato_engine.layers import fp8
from legato_engine.layers.fp8 import Fp8Linear, Fp8MLP
from legato_engine.layers.linear import Linear
from legato_engine.layers.mlp import MLP
from legato_engine.models.moondream.presets import moondream2_config, tiny_random_config
from legato_engine.models.moondream.weights import random_weights

HALF_STEP = 2.0**-4  # of e4m3: three bits after the leading one, rounded to nearest
LAYER_ERROR = 0.045  # of one layer: both factors off by 2.6 % root mean square, and a margin
TOWER_ERROR = 0.15  # of two blocks and the projector
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def relative_error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Of the whole tensor, in float64."""
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


def sizes_of(outputs: int) -> torch.Tensor:
    """Float32 [O]: how large each output of `layer` is, over four decades."""
    return torch.logspace(-3, 1, outputs)


def layer(inputs: int, outputs: int, dtype: torch.dtype = torch.float32) -> Linear:
    """A linear layer of random weights, its outputs of unequal size."""
    linear = Linear(inputs, outputs).to(dtype)
    linear.weight.mul_(sizes_of(outputs)[:, None])
    linear.bias.mul_(sizes_of(outputs))
    return linear


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_a_value_is_off_by_half_a_step(size):
    """Quantised values are within half a step of e4m3, or of its smallest step, in every row."""
    x_TK = torch.randn(40, 64) * torch.logspace(-2, 2, 40)[:, None] * size
    rows = reference.quantise(x_TK)
    assert (rows.values.dtype, rows.scale.shape) == (torch.float8_e4m3fn, (40, 1))
    allowed_TK = x_TK.abs() * HALF_STEP * 1.001 + rows.scale * 2.0**-10
    assert ((rows.values.float() * rows.scale - x_TK).abs() <= allowed_TK).all()
    assert (rows.values.float().abs().amax(-1) == 448).all()


def test_a_row_of_zeros_is_zeros():
    """A row without a largest value has a scale that is not zero."""
    rows = reference.quantise(torch.zeros(2, 16, dtype=torch.bfloat16))
    assert (rows.values.float() == 0).all()
    assert (rows.scale > 0).all()


def test_a_value_that_is_no_number_stays_none():
    """NaN and infinity make their row's outputs not finite, and no other row's."""
    x_TK = torch.randn(3, 32)
    x_TK[0, 3], x_TK[2, 5] = float("nan"), float("inf")
    out_TO = Fp8Linear(layer(32, 16))(x_TK)
    assert out_TO.isfinite().all(-1).tolist() == [False, True, False]
    assert not out_TO[::2].isfinite().any()


def test_what_comes_before_is_not_rounded():
    """The gelu of bf16 rows is that of float32, then quantised."""
    x_TK = torch.randn(5, 48).bfloat16()
    expected = reference.quantise(activations.gelu(x_TK.float()))
    ours = ops.quantise_gelu(x_TK)
    assert torch.equal(ours.values.float(), expected.values.float())
    assert torch.equal(ours.scale, expected.scale)


@pytest.mark.parametrize(("inputs", "outputs"), [(48, 144), (320, 960), (1152, 48), (4304, 16)])
def test_a_layer_is_close_to_float32(inputs, outputs):
    """One layer's relative error stays below `LAYER_ERROR`, however unequal rows and outputs."""
    linear = layer(inputs, outputs)
    sizes_T1 = torch.logspace(-2, 2, 64)[:, None]
    x_TK = torch.randn(2, 64, inputs) * sizes_T1
    ours, truth = Fp8Linear(linear)(x_TK), linear(x_TK)
    assert ours.shape == truth.shape
    sizes_TO = sizes_T1 * sizes_of(outputs)
    assert relative_error(ours / sizes_TO, truth / sizes_TO) < LAYER_ERROR


def test_the_emulation_is_the_multiplication():
    """What runs on a GPU gives the emulation's numbers: the same scales on the same sides."""
    linear = layer(64, 48, torch.bfloat16)
    ours = Fp8Linear(linear)
    rows = ops.quantise(torch.randn(33, 64).bfloat16())
    operands = (rows.values, rows.scale, ours.weight, ours.scale, ours.bias)
    torch.testing.assert_close(
        fp8.multiplied(*operands), fp8.emulated(*operands), rtol=2**-7, atol=1e-5
    )


def test_the_perceptron_is_close_to_float32():
    """Two layers with the gelu between them."""
    mlp = MLP(96, 320, 64)
    x_TK = torch.randn(30, 96)
    assert relative_error(Fp8MLP(mlp)(x_TK), mlp(x_TK)) < 2 * LAYER_ERROR


def test_a_layer_needs_sizes_of_sixteen():
    """Sizes that the multiplication cannot take are refused before any use."""
    for inputs, outputs in ((40, 32), (32, 40)):
        with pytest.raises(InvalidField, match="multiples of 16"):
            Fp8Linear(Linear(inputs, outputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_swap_keeps_the_tower(dtype):
    """After the swap every name is there, other tensors are the same, and embeddings are close."""
    config = tiny_random_config()
    vision = random_weights(config, 0, CPU, dtype).vision
    side = config.vision.crop_size
    pixels = torch.randint(0, 256, (3, side, side, 3), dtype=torch.uint8)
    truth_TX = copy.deepcopy(vision).float()(pixels, (1, 2))
    before = dict(vision.state_dict())
    vision.use_fp8()
    after = dict(vision.state_dict())
    quantised = {name.removesuffix(".scale") + ".weight" for name in after if ".scale" in name}
    assert len(quantised) == 4 * config.vision.num_layers + 2
    assert not any("patch_emb" in name or "ln" in name for name in quantised)
    assert {name for name in after if not name.endswith(".scale")} == before.keys()
    for name, tensor in before.items():
        same_place = after[name].data_ptr() == tensor.data_ptr()
        assert same_place == (name not in quantised), name
        assert after[name].dtype == (torch.float8_e4m3fn if name in quantised else dtype)
    out_TX = vision(pixels, (1, 2))
    assert out_TX.dtype == dtype
    assert 0.001 < relative_error(out_TX, truth_TX) < TOWER_ERROR
    vision.use_fp8()
    assert torch.equal(vision(pixels, (1, 2)), out_TX)


def test_the_source_compiles_for_every_row(tmp_path, monkeypatch):
    """NVRTC takes the source for each row length of the models, also one warp's and the longest."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="the kernel compiler is not installed")
    monkeypatch.setenv("LEGATO_KERNEL_CACHE", str(tmp_path))
    vision = moondream2_config().vision
    dims = (vision.dim, vision.ff_dim, 2 * vision.dim, vision.proj_inner_dim, 16)
    constants = [quantise.defines(dim) for dim in (*dims, quantise.MAX_DIM)]
    for each in constants:
        assert each["ROWS"] == 1 or each["WARPS"] == 1
        assert 32 * each["WARPS"] * each["ROWS"] <= 1024
    try:
        codes = {compile_source(quantise.SOURCE, each, "sm_90") for each in constants}
    except RuntimeError as error:
        pytest.skip(f"NVRTC's library is not installed: {error}")
    assert len(codes) == len(set(dims))
