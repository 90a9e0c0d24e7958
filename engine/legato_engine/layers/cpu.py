"""Layers as a decoder of the CPU's kernels takes them."""

from __future__ import annotations

from torch import nn

from legato_engine.kernels.cpu.decoder import Map, Norm
from legato_engine.layers.linear import Linear


def cpu_map(layer: Linear) -> Map:
    return Map(layer.panels, layer.bias)


def cpu_norm(norm: nn.RMSNorm | nn.LayerNorm) -> Norm:
    bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
    assert norm.eps is not None, "a norm without its epsilon"
    return Norm(norm.weight, bias, norm.eps)
