"""On a GPU: e4m3 layers give what their emulation gives, and their kernels what torch gives.

Shape legend: T rows, K values of a row, O outputs of a layer.
"""

from __future__ import annotations

import pytest
import torch
from legato_engine.device.cuda import CudaDevice
from legato_engine.kernels import ops, reference
from legato_engine.layers import fp8
from legato_engine.layers.fp8 import Fp8Linear
from legato_engine.layers.linear import Linear
from legato_engine.models.moondream.presets import tiny_random_config
from legato_engine.models.moondream.weights import random_weights

from tests.gpu.inputs import DIMS, FLIPPED, assert_same, rows

CUDA = torch.device("cuda", 0)


def _lacks_fp8() -> bool:
    return not torch.cuda.is_available() or not ops.can_multiply_e4m3(CUDA)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_lacks_fp8(), reason="needs a CUDA device with fp8 arithmetic"),
]

COUNTS = (1, 7, 8, 729)
ROUNDED = 2.0**-7  # of a row: bf16 rounds to 2**-9, and fast sums keep about 13 bits


@pytest.fixture(autouse=True)
def _inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dim", DIMS)
def test_plain_rows_are_the_reference(dim):
    """Every byte and every scale of plain rows is torch's, whatever the number of rows."""
    for count in COUNTS:
        x_TK = rows(count, dim)
        assert_same(ops.quantise(x_TK), reference.quantise(x_TK), 0.0)


@pytest.mark.parametrize("dim", DIMS)
def test_gelu_rows_are_the_reference(dim):
    """After a gelu values are torch's, but for ties that fall the other way."""
    x_TK = torch.randn(729, dim, device=CUDA).mul_(3).bfloat16()
    assert_same(ops.quantise_gelu(x_TK), reference.quantise_gelu(x_TK), FLIPPED)
    far_TK = x_TK * 1e3
    assert_same(ops.quantise_gelu(far_TK), reference.quantise_gelu(far_TK), FLIPPED)


def test_rows_that_are_zero_or_not_finite_stay_so():
    """A row of zeros is zeros; a row with NaN or infinity holds a value that is no number."""
    x_TK = rows(4, 1152)
    x_TK[0] = 0
    x_TK[1, 700] = float("nan")
    x_TK[2, 3] = float("inf")
    ours = ops.quantise(x_TK)
    assert (ours.values[0].float() == 0).all()
    assert ours.values.float().isnan().any(-1).tolist() == [False, True, True, False]


@pytest.mark.parametrize(("inputs", "outputs"), [(1152, 3456), (4304, 1152), (2304, 8192)])
def test_a_layer_is_its_emulation(inputs, outputs):
    """The multiplication is float32's of the same e4m3 values, but for what its sums round."""
    linear = Linear(inputs, outputs).to(CUDA, torch.bfloat16)
    ours = Fp8Linear(linear)
    x = ops.quantise(rows(3 * 243, inputs).view(3, 243, inputs))
    out = ours.multiply(x)
    assert out.shape == (3, 243, outputs)
    operands = (x.values.flatten(0, 1), x.scale.flatten(0, 1), ours.weight, ours.scale)
    truth = fp8.emulated(*operands, ours.bias.float()).view_as(out)
    error = (out.float() - truth).norm(dim=-1) / truth.norm(dim=-1)
    assert error.max().item() < ROUNDED


def test_the_tower_can_be_captured():
    """A captured tower gives the same embeddings for new pixels as one that runs at once."""
    config = tiny_random_config()
    vision = random_weights(config, 0, CUDA, torch.bfloat16).vision
    vision.use_fp8()
    side = config.vision.crop_size
    pixels = torch.zeros(3, side, side, 3, dtype=torch.uint8, device=CUDA)
    out_TX = torch.zeros_like(vision(pixels, (1, 2)))
    device = CudaDevice(0)

    def encode() -> None:
        out_TX.copy_(vision(pixels, (1, 2)))

    replay = device.capture(encode)
    pixels.copy_(torch.randint(0, 256, pixels.shape, dtype=torch.uint8))
    torch.cuda.synchronize()
    device.compute.submit(replay)
    torch.cuda.synchronize()
    assert torch.equal(out_TX, vision(pixels, (1, 2)))
    device.close()
