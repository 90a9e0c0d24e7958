"""Attention in groups, and the gated perceptron, against their definitions in float64."""

from __future__ import annotations

import math
from typing import TypeVar

import pytest
import torch
from legato_engine.kernels import ops
from legato_engine.kernels.pages import LayerCache, Span
from legato_engine.layers.attention import GroupedAttention, HeadPlan
from legato_engine.layers.mlp import GatedMLP
from torch import nn

M = TypeVar("M", bound=nn.Module)

DIM, HEAD_DIM, COUNT, PAGE = 24, 8, 5, 4


@pytest.fixture(autouse=True)
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
