"""Tau attention's gains."""

from __future__ import annotations

import math

import pytest
import torch
from legato_engine.layers.attention import Tau

HEADS, SIZE, POSITIONS = 4, 8, 300


def make_tau(gelu="tanh", heads=HEADS, size=SIZE, dtype=torch.float32, seed=0):
    """Gains with random weights."""
    tau = Tau(heads * size, heads, POSITIONS, gelu).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    tau.wqwv.copy_(torch.randn(tau.wqwv.shape, generator=generator) / math.sqrt(3 * heads * size))
    tau.alpha.copy_(torch.randn(heads, generator=generator))
    tau.to(dtype).fill()
    return tau


def tokens(count, dtype=torch.float32, heads=HEADS, size=SIZE):
    """What the fused projection makes of them."""
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 3, heads, size, generator=generator).to(dtype)


def exact_gelu(x):
    """By its formula."""
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def tanh_gelu(x):
    """By its formula."""
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_weights_nothing_changes(dtype):
    """Zero weights and a zero alpha are gains of one: not a bit changes at any position."""
    tau = make_tau(dtype=dtype)
    tau.wqwv.zero_()
    tau.alpha.zero_()
    tau.fill()
    qkv = tokens(9, dtype)
    assert torch.equal(tau(qkv, torch.arange(100, 109)), qkv)


@pytest.mark.parametrize(("name", "gelu"), [("tanh", tanh_gelu), ("exact", exact_gelu)])
def test_one_head_by_hand(name, gelu):
    """The gains are tanh of a sum of gelus, plus a half and a sigmoid of the logarithm of p + 1."""
    tau = make_tau(name, heads=1, size=1)
    tau.wqwv.copy_(torch.tensor([[0.3, -0.5, 0.2], [0.1, 0.4, -0.6]]))
    tau.alpha.fill_(0.7)
    tau.fill()
    q, k, v = 1.25, -0.5, 2.0
    features = gelu(q), gelu(k), gelu(v)
    place = 0.5 + 1 / (1 + math.exp(-0.7 * math.log(17 + 1)))
    gain_q = math.tanh(0.3 * features[0] - 0.5 * features[1] + 0.2 * features[2]) + place
    gain_v = math.tanh(0.1 * features[0] + 0.4 * features[1] - 0.6 * features[2]) + place
    out = tau(torch.tensor([q, k, v]).view(1, 3, 1, 1), torch.tensor([17]))
    assert out.flatten().tolist() == pytest.approx([q * gain_q, k, v * gain_v], rel=2e-6)


def test_each_head_has_its_own_gain():
    """A row of the weights and an alpha belong to one head; the first rows to queries."""
    tau, qkv, positions_T = make_tau(), tokens(5), torch.arange(40, 45)
    plain = tau(qkv, positions_T)
    for row in range(2 * HEADS):
        changed = make_tau()
        changed.wqwv[row] += 1.0
        part, head = (0, row) if row < HEADS else (2, row - HEADS)
        expected = torch.zeros(3, HEADS, dtype=torch.bool)
        expected[part, head] = True
        assert torch.equal((changed(qkv, positions_T) != plain).any(-1).any(0), expected)
    changed = make_tau()
    changed.alpha[1] += 1.0
    changed.fill()
    heads = (changed(qkv, positions_T) != plain).any(-1).any(0)
    assert heads.nonzero().tolist() == [[0, 1], [2, 1]]


def test_the_table_is_float32_in_bfloat16():
    """Positions are not rounded: neighbours far out have gains of their own."""
    tau = make_tau(dtype=torch.bfloat16)
    assert tau.gain_PH.dtype is torch.float32
    assert (tau.gain_PH[280:300].diff(dim=0) != 0).all()


@pytest.mark.parametrize("heads", [2, 3, 4])
def test_a_token_decides_its_own_bits(heads):
    """On the CPU a token's bits do not depend on its neighbours or its place among them."""
    tau, qkv = make_tau(heads=heads, size=32), tokens(40, heads=heads, size=32)
    positions_T = torch.arange(200, 240)
    whole = tau(qkv, positions_T)
    for rows in ([0], [5, 0, 9], list(range(13)), list(range(39, -1, -1))):
        assert torch.equal(tau(qkv[rows], positions_T[rows]), whole[rows])
