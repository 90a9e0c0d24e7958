"""A residual sum and its layer norm in one kernel, and the same in torch beside it.

The sum is rounded once, to the dtype of its terms; the norm is done in float32 and rounded to that
dtype, or quantised to e4m3 with one scale per row and not rounded before.

Shape legend: K values of a row; `...` any leading dimensions.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from legato_engine.kernels.cuda import quantise
from legato_engine.kernels.cuda.quantise import Quantised, RowModule

SOURCE = "norm.cu"


def add_norm(
    x: torch.Tensor, y: torch.Tensor | None, norm: nn.LayerNorm, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum x + y, or x itself, and its layer norm over K, which is `out` if that is given.

    y has x's shape, or repeats over its first dimension; what was written last of them was written
    by a kernel and no copy. The sum may be stored where x was: x is
    the caller's own and is not used any more.
    """
    if (kernels := _kernels_for(x, y, norm)) is None:
        x, normed = reference(x, y, norm)
        return x, normed if out is None else out.copy_(normed)
    return kernels.add_norm(x, y, norm, out)


def add_norm_quantised(
    x: torch.Tensor, y: torch.Tensor | None, norm: nn.LayerNorm
) -> tuple[torch.Tensor, Quantised]:
    """See `add_norm`; where that runs on a GPU, it is one with e4m3."""
    if (kernels := _kernels_for(x, y, norm)) is None:
        return reference_quantised(x, y, norm)
    return kernels.add_norm_quantised(x, y, norm)


def add3_norm(
    x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, norm: nn.LayerNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum x + y + z, rounded once or twice, and its layer norm over K.

    The three have one shape, and what was written last of them was written by a kernel and no copy.
    The sum may be stored where y was: y is the caller's own and is not used any more.
    """
    if z.shape != y.shape or (kernels := _kernels_for(x, y, norm, z)) is None:
        return reference(x + y, z, norm)
    return kernels.add3_norm(x, y, z, norm)


def reference(
    x: torch.Tensor, y: torch.Tensor | None, norm: nn.LayerNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `add_norm`."""
    x = x if y is None else x + y
    normed: torch.Tensor = norm(x)
    return x, normed


def reference_quantised(
    x: torch.Tensor, y: torch.Tensor | None, norm: nn.LayerNorm
) -> tuple[torch.Tensor, Quantised]:
    """See `add_norm_quantised`."""
    x = x if y is None else x + y
    weight, bias = norm.weight.float(), norm.bias.float()
    normed = F.layer_norm(x.float(), norm.normalized_shape, weight, bias, norm.eps)
    return x, quantise.reference(normed)


class NormKernels:
    """Both kernels for rows of `dim` bf16 values, on the current device."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._module = RowModule(SOURCE, dim)
        self._plain = self._module.kernel("add_norm")
        self._plain3 = self._module.kernel("add3_norm")
        has_e4m3 = torch.cuda.get_device_capability() >= quantise.FIRST_WITH_E4M3
        self._quantised = self._module.kernel("add_norm_quantise") if has_e4m3 else None

    def add_norm(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None,
        norm: nn.LayerNorm,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the function; x becomes the sum."""
        normed = torch.empty_like(x) if out is None else out
        operands = (x, y, self._rows(y), norm.weight, norm.bias, norm.eps, normed)
        self._module.launch(self._plain, operands, self._rows(x), overlap=True)
        return x, normed

    def add3_norm(
        self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, norm: nn.LayerNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the function; y becomes the sum."""
        normed = torch.empty_like(y)
        operands = (x, y, z, norm.weight, norm.bias, norm.eps, normed)
        self._module.launch(self._plain3, operands, self._rows(y), overlap=True)
        return y, normed

    def add_norm_quantised(
        self, x: torch.Tensor, y: torch.Tensor | None, norm: nn.LayerNorm
    ) -> tuple[torch.Tensor, Quantised]:
        """See the function; x becomes the sum."""
        assert self._quantised is not None, "no e4m3 on this GPU"
        out = quantise.empty(x)
        operands = (x, y, self._rows(y), norm.weight, norm.bias, norm.eps, out.values, out.scale)
        self._module.launch(self._quantised, operands, self._rows(x), overlap=True)
        return x, out

    def _rows(self, x: torch.Tensor | None) -> int:
        return 0 if x is None else x.numel() // self._dim


def _kernels_for(
    x: torch.Tensor, y: torch.Tensor | None, norm: nn.LayerNorm, *more: torch.Tensor
) -> NormKernels | None:
    """None where torch does it: not bf16 on a GPU, or tensors that the kernels cannot load."""
    terms = more if y is None else (y, *more)
    if not quantise.fits(x) or (y is not None and y.shape not in (x.shape, (1, *x.shape[1:]))):
        return None
    operands = (x, *terms, norm.weight, norm.bias)
    if any(each.dtype != x.dtype or not each.is_contiguous() for each in operands):
        return None
    return _compiled(x.shape[-1], x.device) if quantise.aligned(*operands) else None


@functools.cache
def _compiled(dim: int, device: torch.device) -> NormKernels:
    with torch.cuda.device(device):
        return NormKernels(dim)
