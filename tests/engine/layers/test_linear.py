"""A layer's inputs may be padded once instead of at each call, and counters cleared for several.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import pytest
import torch
from legato_engine.kernels import ops
from legato_engine.layers.linear import Linear, TileCounters


def test_a_widened_layer_computes_what_it_did():
    """Rows of the old width and rows padded with zeros agree; widening twice changes nothing."""
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


def test_counters_belong_to_their_layers_while_they_are_cleared():
    """Each layer has a zeroed counter inside, whatever was counted before, and none outside."""
    layers = [Linear(4, 3), Linear(3, 2)]
    counters = TileCounters(layers, torch.device("cpu"))
    for _ in range(2):
        with counters.cleared():
            first, second = (layer.counter for layer in layers)
            assert first is not None
            assert second is not None
            assert not first.any()
            assert not second.any()
            first.fill_(1)
            assert not second.any()
        assert all(layer.counter is None for layer in layers)
    with pytest.raises(ZeroDivisionError), counters.cleared():
        raise ZeroDivisionError
    assert all(layer.counter is None for layer in layers)


def test_counters_change_nothing_where_no_tiles_are_dealt_out():
    """On the CPU a layer gives the same with one and without."""
    torch.manual_seed(0)
    layer, x_TI = Linear(8, 6), torch.randn(5, 8)
    plain_TO, gelu_TO = layer(x_TI), layer.gelu(x_TI)
    with TileCounters([layer], torch.device("cpu")).cleared():
        assert torch.equal(layer(x_TI), plain_TO)
        assert torch.equal(layer.gelu(x_TI), gelu_TO)
