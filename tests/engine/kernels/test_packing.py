"""Packed weights are in the kernels' order, and folded maps equal the maps they replace.

Shape legend: O outputs, I inputs, B tokens.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from legato_engine.kernels.cuda.skinny_gemm import KINDS, fold_norm, pack, packed_map, pair_rotated

WARPS = 8


def read_back(packed, outputs, inputs, parts):
    """[O, I] weights out of their packed order, as `skinny_gemm.cuh` describes it.

    A block of 16 rows, then its stages. Of a stage each warp has 64 inputs: a run of 32 lanes with
    8 values each for rows 0-7 and the first 32 inputs, one for the others, then rows 8-15.
    """
    groups = inputs // parts // 64
    chunk = 64 * max(g for g in range(1, WARPS + 1) if groups % g == 0)
    at = torch.arange(outputs * inputs)
    value, lane, run = at % 8, at // 8 % 32, at // 256 % 4
    warp = at // 1024 % (chunk // 64)
    stage = at // (16 * chunk) % (inputs // chunk)
    row = at // (16 * inputs) * 16 + run // 2 * 8 + lane // 4
    column = stage * chunk + warp * 64 + run % 2 * 32 + lane % 4 * 8 + value
    weights_OI = torch.full((outputs, inputs), -1, dtype=packed.dtype)
    weights_OI[row, column] = packed.flatten()
    return weights_OI


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 20), st.sampled_from([1, 2, 4]))
def test_every_weight_stands_where_it_is_read(blocks, groups, parts):
    """Reading weights back in the kernels' documented order gives the map again."""
    outputs, inputs = 16 * blocks, 64 * groups * parts
    weights_OI = torch.arange(outputs * inputs, dtype=torch.int32).view(outputs, inputs)
    packed = pack(weights_OI, parts)
    assert packed.is_contiguous()
    assert torch.equal(read_back(packed, outputs, inputs, parts), weights_OI)


@pytest.mark.parametrize("heads", [1, 5, 32])
def test_rotated_pairs_share_a_lane(heads):
    """The partner of a rotated row is 8 rows after it; the rest of a head keeps its order."""
    order = pair_rotated(heads, torch.device("cpu"))
    assert torch.equal(order.sort().values, torch.arange(3 * heads * 64))
    within = order.view(3 * heads, 4, 2, 8) - 64 * torch.arange(3 * heads).view(-1, 1, 1, 1)
    first, second = within[:, :, 0], within[:, :, 1]
    assert torch.equal(second[:, :2], first[:, :2] + 16)
    assert torch.equal(first[:, :2].flatten(1), torch.arange(16).expand(3 * heads, -1))
    assert torch.equal(within[:, 2:].flatten(1), torch.arange(32, 64).expand(3 * heads, -1))


def folded_map(x_BI, weights_OI, folded_O2):
    """The map of raw inputs as the kernels compute it, in float64."""
    x_BI, (sums_O, biases_O) = x_BI.double(), folded_O2.double().unbind(1)
    mean_B1 = x_BI.mean(1, keepdim=True)
    scale_B1 = (x_BI.var(1, correction=0, keepdim=True) + 1e-5).rsqrt()
    return scale_B1 * (x_BI @ weights_OI.double().T - mean_B1 * sums_O) + biases_O


def random_map(dtype):
    """A map with its bias, and a norm's scale and shift."""
    generator = torch.Generator().manual_seed(3)
    shapes = (48, 192), (48,), (192,), (192,)
    weights, bias, scale, shift = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    return weights, bias, (scale + 1, shift)


def test_a_folded_norm_is_the_norm_before_the_map():
    """Scale, mean and deviation taken out of the sum give the same outputs."""
    weights_OI, bias_O, (scale_I, shift_I) = random_map(torch.float64)
    x_BI = torch.randn(7, 192, dtype=torch.float64) * 3 + 5
    normed_BI = F.layer_norm(x_BI, (192,), scale_I, shift_I, eps=1e-5)
    folded = folded_map(x_BI, *fold_norm(weights_OI, bias_O, (scale_I, shift_I)))
    torch.testing.assert_close(folded, F.linear(normed_BI, weights_OI, bias_O), rtol=0, atol=1e-4)


def test_a_mean_falls_out_of_rounded_weights():
    """What is taken off for the mean is the sum of the weights as they are stored."""
    weights_OI, bias_O, norm = random_map(torch.bfloat16)
    scaled_OI, folded_O2 = fold_norm(weights_OI, bias_O, norm)
    assert scaled_OI.dtype is torch.bfloat16
    x_BI = torch.ones(1, 192)  # a deviation of zero: what is left of the mean counts 316 times
    expected_O = weights_OI.double() @ norm[1].double() + bias_O.double()
    torch.testing.assert_close(
        folded_map(x_BI, scaled_OI, folded_O2)[0], expected_O, rtol=0, atol=0.05
    )


@pytest.mark.parametrize(("name", "most"), [("fp8", 0.03), ("int8", 0.01), ("int4", 0.1)])
@pytest.mark.parametrize("parts", [1, 2])
def test_quantised_maps_are_near_their_weights(name, most, parts):
    """Read back in their own order, rows and columns are those of the map; zeros stay zeros."""
    torch.manual_seed(0)
    weights_OI = torch.randn(48, 256).bfloat16()
    weights_OI[5] = 0.0
    order_O = torch.randperm(48)
    packed = packed_map(weights_OI, KINDS[name], parts, order_O)
    read_OI = packed.dequantised()
    assert (read_OI - weights_OI.float()).norm() < most * weights_OI.float().norm()
    assert (read_OI[5] == 0).all()
    assert packed.data.nbytes <= weights_OI.nbytes * packed.kind.stage_bytes(64) // 2048
    rows, columns = slice(0, 48), slice(64, 192)
    assert torch.equal(packed.part(rows, columns), read_OI[:, columns].bfloat16())
