"""Activations: what they compute, and that an element decides its own bits.

Shape legend: T rows, W width.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from legato_engine.kernels import activations, ops, reference
from legato_engine.layers.attention import Tau
from legato_engine.layers.linear import Linear
from legato_engine.layers.mlp import MLP


def layer(make):
    """A layer of the width and dtype with random weights."""

    def made(width, dtype):
        return make(width).requires_grad_(requires_grad=False).to(dtype)

    return made


def gelu_of_a_layer(width, dtype):
    return layer(lambda width: Linear(width, width))(width, dtype).gelu


def tau(gelu):
    def made(width, dtype):
        tau = Tau(width, 2, 8, gelu).requires_grad_(requires_grad=False)
        tau.wqwv.normal_(0, width**-0.5)
        tau.alpha.normal_()
        tau.to(dtype).fill()

        def run(x_TW):
            qkv_T3HE = x_TW.repeat(1, 3).view(len(x_TW), 3, 2, -1)
            return tau(qkv_T3HE, torch.full((len(x_TW),), 7))

        return run

    return made


def function(run):
    return lambda _width, _dtype: run


RUNS = {
    "gelu": function(activations.gelu),
    "exact gelu": function(lambda x_TW: activations.gelu(x_TW, "none")),
    "silu": function(activations.silu),
    "sigmoid": function(activations.sigmoid),
    "tanh": function(torch.tanh),
    "exp": function(torch.exp),
    "softmax": function(lambda x_TW: x_TW.softmax(-1)),
    "log_softmax": function(lambda x_TW: x_TW.log_softmax(-1)),
    "logsumexp": function(lambda x_TW: x_TW.logsumexp(-1, keepdim=True)),
    "gate": function(lambda x_TW: ops.gate(torch.cat([x_TW, x_TW.flip(-1)], dim=-1))),
    "gate of an expert": function(lambda x_TW: reference.gate(x_TW.repeat(1, 2))),
    "quantised gelu": function(lambda x_TW: reference.quantise_gelu(x_TW).values.float()),
    "gelu of a layer": gelu_of_a_layer,
    "MLP": layer(lambda width: MLP(width, 2 * width, width)),
    "tau": tau("tanh"),
    "exact tau": tau("none"),
}


@pytest.fixture(autouse=True)
def threads():
    """A test's own number of threads ends with it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [24, 40, 100, 960])
@pytest.mark.parametrize("name", RUNS)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(name, width, dtype):
    """At both ends of batches that one thread and several compute, with 1, 4 and 8 threads."""
    torch.manual_seed(0)
    run = RUNS[name](width, dtype)
    x_TW = (3 * torch.randn(700, width)).to(dtype)
    rows = (*range(12), 341, 342, 698, 699)
    for count in (1, 4, 8):
        torch.set_num_threads(count)
        alone = {row: run(x_TW[row : row + 1].clone()) for row in rows}
        for first, last in ((0, 2), (0, 3), (1, 12), (340, 343), (0, 700)):
            batch = run(x_TW[first:last].clone())
            for row in rows:
                if first <= row < last:
                    assert torch.equal(batch[row - first], alone[row][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_the_formulas_rounded_once(dtype):
    """So they are the same on every CPU, with any number of threads."""
    x = torch.cat([torch.linspace(-15, 15, 20_001), torch.tensor([0.0, -100.0, 100.0, torch.nan])])
    x = x.to(dtype)
    wide = x.double().numpy()
    u = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
    with np.errstate(over="ignore"):
        expected = {
            "gelu": wide / (1 + np.exp(-2 * u)),
            "silu": wide / (1 + np.exp(-wide)),
            "sigmoid": 1 / (1 + np.exp(-wide)),
        }
    for name, values in expected.items():
        ours = getattr(activations, name)(x)
        assert ours.dtype is dtype
        assert torch.equal(ours.nan_to_num(7), torch.from_numpy(values).to(dtype).nan_to_num(7))
