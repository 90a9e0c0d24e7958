"""The operations of `row_ops` with torch; shape legend as there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from legato_engine.kernels import activations
from legato_engine.kernels.quantised import E4M3, Quantised

_LARGEST = 448.0
_FLOOR = 1e-12


def add_norm(
    x: torch.Tensor, y: torch.Tensor | None, norm: nn.LayerNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x if y is None else x + y
    normed: torch.Tensor = norm(x)
    return x, normed


def add_norm_quantised(
    x: torch.Tensor, y: torch.Tensor | None, norm: nn.LayerNorm
) -> tuple[torch.Tensor, Quantised]:
    x = x if y is None else x + y
    weight, bias = norm.weight.float(), norm.bias.float()
    normed = F.layer_norm(x.float(), norm.normalized_shape, weight, bias, norm.eps)
    return x, quantise(normed)


def quantise(x: torch.Tensor) -> Quantised:
    x = x.float()
    amax = x.abs().amax(-1, keepdim=True).clamp_min(_FLOOR)
    values = (x * (amax.reciprocal() * _LARGEST)).clamp(-_LARGEST, _LARGEST)
    return Quantised(values.to(E4M3), amax * (1.0 / _LARGEST))


def quantise_gelu(x: torch.Tensor) -> Quantised:
    return quantise(activations.gelu(x.float()))
