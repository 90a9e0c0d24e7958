"""Norms of residual sums, and quantisation to e4m3, row by row.

Sums are rounded once, to their terms' dtype. Norms and gelus are float32, rounded to that dtype
unless they are quantised. A quantised row is divided by its scale, amax / 448.

Shape legend: K values of a row; `...` any leading dimensions.
"""

from __future__ import annotations

import torch
from torch import nn

from legato_engine.kernels import reference_rows
from legato_engine.kernels.cuda import norm as norm_kernels
from legato_engine.kernels.cuda import quantise as quantise_kernels
from legato_engine.kernels.quantised import Quantised


def add_norm(
    x: torch.Tensor, y: torch.Tensor | None, norm: nn.LayerNorm, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + y (x itself without y) and its layer norm over K, in `out` if given.

    y may repeat over its first dimension. The last write to either must come from a kernel, not
    from a copy. The sum may reuse x, which the caller must own and not read again.
    """
    if (kernels := norm_kernels.kernels_for(x, y, norm)) is None:
        x, normed = reference_rows.add_norm(x, y, norm)
        return x, normed if out is None else out.copy_(normed)
    return kernels.add_norm(x, y, norm, out)


def add3_norm(
    x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, norm: nn.LayerNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `add_norm`, of x + y + z of one shape, rounded once or twice.

    The sum may reuse y, not x.
    """
    if z.shape != y.shape or (kernels := norm_kernels.kernels_for(x, y, norm, z)) is None:
        return reference_rows.add_norm(x + y, z, norm)
    return kernels.add3_norm(x, y, z, norm)


def add_rms_norm(
    x: torch.Tensor, y: torch.Tensor | None, norm: nn.RMSNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `add_norm`, with y of the shape of x."""
    if norm.eps is None or (kernels := norm_kernels.kernels_for(x, y, norm)) is None:
        x = x if y is None else x + y
        return x, norm(x)
    return kernels.add_rms_norm(x, y, norm)


def add_norm_quantised(
    x: torch.Tensor, y: torch.Tensor | None, norm: nn.LayerNorm
) -> tuple[torch.Tensor, Quantised]:
    """Like `add_norm`, with the norm quantised; a GPU needs `can_multiply_e4m3`."""
    if (kernels := norm_kernels.kernels_for(x, y, norm)) is None:
        return reference_rows.add_norm_quantised(x, y, norm)
    return kernels.add_norm_quantised(x, y, norm)


def quantise(x: torch.Tensor) -> Quantised:
    if (kernels := quantise_kernels.kernels_for(x)) is None:
        return reference_rows.quantise(x)
    return kernels.launch(kernels.plain, x, overlap=False)


def quantise_gelu(x: torch.Tensor) -> Quantised:
    """Quantise the gelu (tanh form) of [..., K], which a kernel and no copy has written."""
    if (kernels := quantise_kernels.kernels_for(x)) is None:
        return reference_rows.quantise_gelu(x)
    return kernels.launch(kernels.gelu, x, overlap=True)


def can_multiply_e4m3(device: torch.device) -> bool:
    """Whether the device multiplies e4m3 matrices; the CPU emulates it."""
    return device.type == "cpu" or quantise_kernels.has_e4m3(device)
