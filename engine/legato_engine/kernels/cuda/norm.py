"""A residual sum and its norm in one launch, for rows of bf16."""

from __future__ import annotations

import torch
from torch import nn

from legato_engine.kernels.cuda import capability, quantise
from legato_engine.kernels.cuda.capability import Feature
from legato_engine.kernels.cuda.module import made_on
from legato_engine.kernels.cuda.quantise import RowKernels
from legato_engine.kernels.parameters import Quantised

SOURCE = "norm.cu"


class NormKernels(RowKernels):
    """Norms of sums, which are written to a term: y if there are three, else x."""

    def __init__(self, dim: int) -> None:
        super().__init__(SOURCE, dim)
        self._plain = self._module.kernel("add_norm")
        self._plain3 = self._module.kernel("add3_norm")
        self._rms = self._module.kernel("add_rms_norm")
        has_e4m3 = capability.current_gpu().has(Feature.E4M3)
        self._quantised = self._module.kernel("add_norm_quantise") if has_e4m3 else None

    def add_norm(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None,
        norm: nn.LayerNorm,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = torch.empty_like(x) if out is None else out
        operands = (x, y, self._count(y), norm.weight, norm.bias, norm.eps, normed)
        self._launch(self._plain, operands, self._count(x), overlap=True)
        return x, normed

    def add3_norm(
        self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, norm: nn.LayerNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = torch.empty_like(y)
        operands = (x, y, z, norm.weight, norm.bias, norm.eps, normed)
        self._launch(self._plain3, operands, self._count(y), overlap=True)
        return y, normed

    def add_rms_norm(
        self, x: torch.Tensor, y: torch.Tensor | None, norm: nn.RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = torch.empty_like(x)
        operands = (x, y, norm.weight, norm.eps, normed)
        self._launch(self._rms, operands, self._count(x), overlap=True)
        return x, normed

    def add_norm_quantised(
        self, x: torch.Tensor, y: torch.Tensor | None, norm: nn.LayerNorm
    ) -> tuple[torch.Tensor, Quantised]:
        assert self._quantised is not None, "no e4m3 on this GPU"
        out = quantise.empty(x)
        operands = (x, y, self._count(y), norm.weight, norm.bias, norm.eps, out.values, out.scale)
        self._launch(self._quantised, operands, self._count(x), overlap=True)
        return x, out

    def _count(self, x: torch.Tensor | None) -> int:
        return 0 if x is None else x.numel() // self._dim


def kernels_for(
    x: torch.Tensor,
    y: torch.Tensor | None,
    norm: nn.LayerNorm | nn.RMSNorm,
    *more: torch.Tensor,
) -> NormKernels | None:
    terms = more if y is None else (y, *more)
    if not quantise.fits(x) or (y is not None and y.shape not in (x.shape, (1, *x.shape[1:]))):
        return None
    operands = (x, *terms, *norm.parameters())
    if any(each.dtype != x.dtype or not each.is_contiguous() for each in operands):
        return None
    return made_on(x.device, NormKernels, x.shape[-1]) if quantise.aligned(*operands) else None
