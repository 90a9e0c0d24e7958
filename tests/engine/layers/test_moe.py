"""A mixture of experts as a layer."""

from __future__ import annotations

import math

import torch
from legato_engine.layers.mlp import MoE

DIM, INNER, NUM_EXPERTS, NUM_ACTIVE = 32, 24, 6, 2


def make_moe(seed=0):
    """Experts and a router with random weights."""
    moe = MoE(DIM, INNER, NUM_EXPERTS, NUM_ACTIVE).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for tensor in moe.state_dict().values():
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(noise / math.sqrt(tensor.shape[-1]))
    return moe


def rows(count=13):
    """Normed rows."""
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(1))


def test_the_order_of_experts_means_nothing():
    """Experts renumbered together with the router give the same rows."""
    moe, renumbered = make_moe(), make_moe()
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    for name, tensor in moe.state_dict().items():
        renumbered.state_dict()[name].copy_(tensor[order])
    x_TD = rows()
    out_TD = renumbered(x_TD, capturable=False)
    torch.testing.assert_close(out_TD, moe(x_TD, capturable=False), rtol=1e-5, atol=1e-6)
    swapped = make_moe()
    swapped.fc1.weight.copy_(moe.fc1.weight[order])
    assert not torch.allclose(swapped(x_TD, capturable=False), out_TD)


def test_the_router_counts_its_bias():
    """A bias that outweighs everything sends every token to its two experts, at equal shares."""
    moe = make_moe()
    moe.router.weight.zero_()
    moe.router.bias.copy_(torch.tensor([0.0, 9.0, 0.0, 0.0, 9.0, 0.0]))
    x_TD = rows()
    expected_TD = torch.zeros_like(x_TD)
    for expert in (1, 4):
        u_TI, g_TI = (x_TD @ moe.fc1.weight[expert].T).chunk(2, -1)
        inner_TI = 0.5 * u_TI * (1 + torch.erf(u_TI / math.sqrt(2))) * (g_TI + 1)
        expected_TD += 0.5 * inner_TI @ moe.fc2.weight[expert].T
    torch.testing.assert_close(moe(x_TD, capturable=False), expected_TD, rtol=1e-5, atol=1e-5)


def test_e4m3_is_to_be_loaded():
    """Experts in e4m3 have a float32 scale for each output, under names that a file fills."""
    with torch.device("meta"):
        moe = MoE(DIM, INNER, NUM_EXPERTS, NUM_ACTIVE).to(torch.bfloat16)
        moe.use_fp8()
    state = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in moe.state_dict().items()}
    assert state == {
        "router.weight": (torch.bfloat16, (NUM_EXPERTS, DIM)),
        "router.bias": (torch.bfloat16, (NUM_EXPERTS,)),
        "fc1.weight": (torch.float8_e4m3fn, (NUM_EXPERTS, 2 * INNER, DIM)),
        "fc1.scale": (torch.float32, (NUM_EXPERTS, 2 * INNER)),
        "fc2.weight": (torch.float8_e4m3fn, (NUM_EXPERTS, DIM, INNER)),
        "fc2.scale": (torch.float32, (NUM_EXPERTS, DIM)),
    }
