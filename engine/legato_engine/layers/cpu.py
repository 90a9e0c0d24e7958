"""Layers as a decoder of the CPU's kernels takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from legato_engine.kernels.cpu.decoder import LANES, CpuDecoder, CpuLayer, CpuMap, CpuNorm, CpuSizes
from legato_engine.kernels.cpu.library import Library
from legato_engine.layers.linear import Linear
from legato_engine.layers.mlp import MLP


def cpu_map(layer: Linear) -> CpuMap:
    return CpuMap(layer.panels, layer.bias)


def cpu_norm(norm: nn.RMSNorm | nn.LayerNorm) -> CpuNorm:
    bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
    assert norm.eps is not None, "a norm without its epsilon"
    return CpuNorm(norm.weight, bias, norm.eps)


def ungated_layer(
    norm: nn.LayerNorm, qkv: Linear, out: Linear, mlp: MLP, next_norm: nn.LayerNorm | None = None
) -> CpuLayer:
    """Make a layer whose MLP reads the norm of its attention, or the `next_norm`."""
    return CpuLayer(
        norm=cpu_norm(norm),
        qkv=cpu_map(qkv),
        out=cpu_map(out),
        up=cpu_map(mlp.fc1),
        down=cpu_map(mlp.fc2),
        next_norm=None if next_norm is None else cpu_norm(next_norm),
    )


def ungated_decoder(
    library: Library,
    layers: Sequence[CpuLayer | None],
    heads: int,
    head_dim: int,
    angles: tuple[torch.Tensor, torch.Tensor],
) -> CpuDecoder | None:
    """Make one of all layers, with as many key heads as heads; None if it cannot run some layer."""
    known = [layer for layer in layers if layer is not None]
    if len(known) < len(layers) or head_dim % LANES:
        return None
    return CpuDecoder(library, known, CpuSizes(heads, heads, head_dim, gated=False), angles)
