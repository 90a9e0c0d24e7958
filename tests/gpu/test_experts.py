"""On a GPU: experts are the formula's in every form, and a captured step follows its routes."""

from __future__ import annotations

import pytest
import torch
from legato_engine.device.cuda import CudaDevice
from legato_engine.kernels import ops
from legato_engine.kernels.cuda import grouped
from legato_engine.kernels.cuda.capability import Kernels, runs
from legato_engine.kernels.parameters import ExpertWeights, Routes

from tests.engine.kernels.expert_cases import by_hand, dequantised, layers, quantised, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
COUNT, MANY = 9, 100


def on_gpu(layer):
    """The same weights there."""
    scale_XO = None if layer.scale_XO is None else layer.scale_XO.to(DEVICE)
    return ExpertWeights(layer.weight_XOI.to(DEVICE), scale_XO)


def bfloat16(x_TD, routes):
    """Tokens and routes in the dtype of the model."""
    return x_TD.bfloat16(), Routes(routes.expert_TK, routes.share_TK.bfloat16())


@pytest.fixture(scope="module", params=["plain", "e4m3"])
def weights(request):
    """Both layers of all experts in bfloat16 or e4m3, and as numbers to compute with."""
    up, down = layers(dtype=torch.bfloat16)
    if request.param == "plain":
        return up, down, up, down
    packed = [quantised(ExpertWeights(layer.weight_XOI.float(), None)) for layer in (up, down)]
    return *packed, *map(dequantised, packed)


@pytest.mark.parametrize("count", [COUNT, MANY])
@pytest.mark.parametrize("capturable", [False, True])
def test_experts_are_the_formula(weights, capturable, count):
    """What the device takes for prefills and for steps stays near the formula."""
    up, down, up_numbers, down_numbers = weights
    x_TD, routes = bfloat16(*tokens(count))
    expected_TD = by_hand(x_TD, routes, up_numbers, down_numbers)
    there = Routes(routes.expert_TK.to(DEVICE), routes.share_TK.to(DEVICE))
    out_TD = ops.experts(x_TD.to(DEVICE), there, on_gpu(up), on_gpu(down), capturable=capturable)
    error = (out_TD.cpu().double() - expected_TD).abs().max()
    assert error < 0.03 * expected_TD.abs().max()


@pytest.mark.parametrize("count", [COUNT, MANY])
def test_a_captured_step_follows_its_routes(weights, count):
    """Replayed with other tokens, a graph gives what running the step with them gives."""
    up, down = map(on_gpu, weights[:2])
    x_TD, routes = bfloat16(*tokens(count))
    x_TD, expert_TK, share_TK = (
        tensor.to(DEVICE) for tensor in (x_TD, routes.expert_TK, routes.share_TK)
    )
    out_TD = torch.empty_like(x_TD)

    def step() -> None:
        out_TD.copy_(ops.experts(x_TD, Routes(expert_TK, share_TK), up, down, capturable=True))

    device = CudaDevice(0)
    try:
        replay = device.capture(step)
        for seed in (1, 2):
            other_TD, other = bfloat16(*tokens(count, seed))
            x_TD.copy_(other_TD)
            expert_TK.copy_(other.expert_TK)
            share_TK.copy_(other.share_TK)
            device.compute.submit(replay)
            device.compute.record().wait()
            replayed_TD = out_TD.clone()
            device.compute.submit(step)
            device.compute.record().wait()
            assert torch.equal(replayed_TD, out_TD)
    finally:
        device.close()


@pytest.mark.parametrize("count", [COUNT, MANY])
def test_bfloat16_and_many_tokens_are_grouped(weights, count):
    """Plain weights go to one product each, e4m3 where widening all of it pays."""
    up, down = map(on_gpu, weights[:2])
    x_TD = tokens(count)[0].to(DEVICE, torch.bfloat16)
    capable = runs(Kernels.GROUPED_EXPERTS, DEVICE)
    grouped_anyway = up.scale_XO is None or count == MANY
    assert grouped.can_group(x_TD, up, down) is (capable and grouped_anyway)
