"""Attention layers: groups, rotary embedding and tau gains."""

from __future__ import annotations

import math
from typing import TypeVar

import pytest
import torch
from legato_engine.kernels import ops
from legato_engine.kernels.pages import LayerCache, Span
from legato_engine.kernels.reference import rotate
from legato_engine.layers.attention import GroupedAttention, HeadPlan, Tau
from legato_engine.layers.mlp import GatedMLP
from legato_engine.layers.rope import LinearScaling, Llama3Scaling, Rope
from torch import nn

# ---------------------------------------------------------------- grouped attention
# Attention in groups, and the gated perceptron, against their definitions in float64.

M = TypeVar("M", bound=nn.Module)

DIM, HEAD_DIM, COUNT, PAGE = 24, 8, 5, 4


@pytest.fixture
def _inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def randomised(module: M) -> M:
    """Weights of no special value, norms included."""
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.4 + 0.2)
    return module


def rms_norm(x, weight, eps):
    """By its formula, in float64."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def expected(attention, plan, x_TD):
    """Head by head; nothing turns."""
    q, k, v = (
        part.double() for part in attention.qkv.weight.split(list(attention.qkv.parts.values()))
    )
    biases = [0.0] * 3
    if plan.qkv_bias:
        biases = [b.double() for b in attention.qkv.bias.split(list(attention.qkv.parts.values()))]
    x_TD = x_TD.double()
    heads = []
    for head in range(plan.num_heads):
        kv = head // (plan.num_heads // plan.num_kv_heads)
        at, at_kv = (slice(i * HEAD_DIM, (i + 1) * HEAD_DIM) for i in (head, kv))
        queries, keys = (
            (x_TD @ w.T + b)[:, s] for w, b, s in ((q, biases[0], at), (k, biases[1], at_kv))
        )
        if plan.norm_eps is not None:
            queries = rms_norm(queries, attention.q_norm.weight, plan.norm_eps)
            keys = rms_norm(keys, attention.k_norm.weight, plan.norm_eps)
        scores = (queries @ keys.T / math.sqrt(HEAD_DIM)).masked_fill(
            torch.ones(COUNT, COUNT).triu(1).bool(), -math.inf
        )
        heads.append(scores.softmax(-1) @ (x_TD @ v.T + biases[2])[:, at_kv])
    out = torch.cat(heads, -1) @ attention.o_proj.weight.double().T
    return out + attention.o_proj.bias.double() if plan.out_bias else out


@pytest.mark.usefixtures("_inference")
@pytest.mark.parametrize(
    "plan",
    [
        HeadPlan(3, 3, HEAD_DIM, qkv_bias=True, out_bias=True),
        HeadPlan(4, 2, HEAD_DIM),
        HeadPlan(8, 2, HEAD_DIM, qkv_bias=True),
        HeadPlan(6, 1, HEAD_DIM, norm_eps=1e-3),
    ],
    ids=["as many", "by two", "by four, biased", "all of one, normed"],
)
def test_heads_share_keys_and_values_in_groups(plan):
    """Neighbouring heads of queries see one head of keys; biases and norms come before the turn."""
    attention = randomised(GroupedAttention(DIM, plan))
    x_TD = torch.randn(COUNT, DIM)
    caches = [torch.full((4, plan.num_kv_heads, PAGE, HEAD_DIM), math.nan) for _ in range(2)]
    still_PR = torch.ones(COUNT, 2)
    where = Span(0, torch.tensor([[3, 1]]), still_PR, torch.zeros_like(still_PR))
    cache = LayerCache(*caches)
    out_TD = attention(x_TD, where, cache, lambda q, k, v, *_: ops.suffix_attention(q, k, v))
    torch.testing.assert_close(
        out_TD.double(), expected(attention, plan, x_TD), rtol=1e-5, atol=1e-5
    )


@pytest.mark.usefixtures("_inference")
def test_the_gate_is_a_silu():
    """Added to a sum: down(silu(gate) * up)."""
    mlp = randomised(GatedMLP(DIM, 40))
    x_TD = torch.randn(COUNT, DIM)
    gate, up = (x_TD.double() @ part.double().T for part in mlp.gate_up.weight.split(40))
    inner = gate / (1 + (-gate).exp()) * up
    expected_TD = inner @ mlp.down_proj.weight.double().T
    to_TD = torch.randn(COUNT, DIM)
    expected_TD += to_TD.double()
    torch.testing.assert_close(mlp.onto(to_TD, x_TD).double(), expected_TD, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- rope


@pytest.fixture
def rope():
    """Theta 10000, 8 rotated dims, 64 positions."""
    rope = Rope(10000.0, 8, 64)
    rope.fill(torch.device("cpu"))
    return rope


def test_pairs_turn_by_their_own_frequency(rope):
    """Dims i and i + 4 turn together by position * theta^(-2i/8)."""
    x_THE = torch.randn(3, 2, 12, generator=torch.Generator().manual_seed(0))
    positions = [0, 5, 63]
    out_THE = rotate(x_THE, *rope.at(torch.tensor(positions)))
    for t, position in enumerate(positions):
        for i in range(4):
            angle = position * 10000.0 ** (-2 * i / 8)
            first, second = x_THE[t, :, i], x_THE[t, :, i + 4]
            turned = first * math.cos(angle) - second * math.sin(angle)
            torch.testing.assert_close(out_THE[t, :, i], turned, atol=1e-5, rtol=1e-5)
            turned = first * math.sin(angle) + second * math.cos(angle)
            torch.testing.assert_close(out_THE[t, :, i + 4], turned, atol=1e-5, rtol=1e-5)


def test_the_rest_of_a_head_passes(rope):
    """Dims after the rotated ones are unchanged."""
    x_THE = torch.randn(3, 2, 12)
    out_THE = rotate(x_THE, *rope.at(torch.tensor([1, 2, 3])))
    assert torch.equal(out_THE[..., 8:], x_THE[..., 8:])


def test_scores_depend_on_distance_only(rope):
    """Moving query and key by the same number of positions leaves their product."""
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)

    def score(at_q, at_k):
        turned_q = rotate(q, *rope.at(torch.tensor([at_q])))
        return (turned_q * rotate(k, *rope.at(torch.tensor([at_k])))).sum()

    torch.testing.assert_close(score(9, 4), score(40, 35), atol=1e-4, rtol=1e-4)


def test_tables_stay_float32_in_bfloat16(rope):
    """The angles are exact in float32 and the result is cast back once."""
    cos, sin = rope.at(torch.tensor([40]))
    out = rotate(torch.ones(1, 1, 12, dtype=torch.bfloat16), cos, sin)
    assert cos.dtype is torch.float32
    assert out.dtype is torch.bfloat16


def speeds(scaling, theta=500_000.0, rotary_dim=64):
    """Radians per position of each pair, from a position near enough to turn none of them round."""
    rope = Rope(theta, rotary_dim, 2, scaling)
    rope.fill(torch.device("cpu"))
    return torch.atan2(rope.sin_PR[1], rope.cos_PR[1]).tolist()


def test_linear_scaling_slows_every_pair():
    """Position p of the longer context has the angle that p / factor had."""
    for slow, fast in zip(speeds(LinearScaling(4.0)), speeds(None), strict=True):
        assert slow == pytest.approx(fast / 4, rel=1e-5)


def test_llama3_scaling_slows_only_the_slow_pairs():
    """Pairs of many turns keep their speed, those of few lose the factor, between them it falls."""
    scaling = Llama3Scaling(factor=8.0, low=1.0, high=4.0, first_context=8192)
    for slow, fast in zip(speeds(scaling), speeds(None), strict=True):
        turns = 8192 * fast / (2 * math.pi)
        kept = min(max((turns - 1.0) / 3.0, 0.0), 1.0)
        assert slow == pytest.approx(fast * (kept + (1 - kept) / 8), rel=1e-4)
    ratios = [slow / fast for slow, fast in zip(speeds(scaling), speeds(None), strict=True)]
    assert ratios[0] == pytest.approx(1.0, rel=1e-5)
    assert ratios[-1] == pytest.approx(1 / 8, rel=1e-4)
    assert any(0.2 < ratio < 0.9 for ratio in ratios)


# ---------------------------------------------------------------- tau

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
