"""A layer's inputs may be padded once instead of at each call.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from legato_engine.kernels import ops
from legato_engine.layers.linear import Linear


def test_a_widened_layer_computes_what_it_did():
    """Of rows as wide as before, and of rows with zeros behind them; a second time changes none."""
    torch.manual_seed(0)
    layer = Linear(21, 5).requires_grad_(requires_grad=False)
    x_TI = torch.randn(2, 3, 21)
    before_TO = layer(x_TI)
    for _ in range(2):
        layer.widen(8)
        assert layer.weight.shape == (5, 24)
        assert layer.in_features == 24
        torch.testing.assert_close(layer(x_TI), before_TO)
        wide_TI = torch.nn.functional.pad(x_TI, (0, 3))
        assert torch.equal(layer(wide_TI), layer(x_TI))


def test_two_terms_stay_apart_where_no_product_adds_them():
    """On the CPU the first is the very tensor that came, the second what the layer makes."""
    torch.manual_seed(0)
    layer = Linear(16, 8)
    to_TO, x_TI = torch.randn(200, 8), torch.randn(200, 16)
    first, second = ops.linear_onto(to_TO, x_TI, layer.weight, layer.bias)
    assert first is to_TO
    assert second is not None
    assert torch.equal(second, layer(x_TI))
