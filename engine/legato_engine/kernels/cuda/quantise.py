"""Quantisation of bf16 rows to e4m3, and what all kernels over rows share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from legato_engine.kernels.cuda.capability import Kernels, runs
from legato_engine.kernels.cuda.module import Argument, Kernel, Module, made_on
from legato_engine.kernels.parameters import E4M3, Quantised

SOURCE = "quantise.cu"
MAX_DIM = 8192

_VALUES_PER_LOAD = 8
_ALIGNMENT = 16  # bytes of a load
_ROWS = 4  # of a thread block whose warps have a row each
_LOADS_ALONE = 5  # of a lane, at most, if one warp has a row
_LOADS_SHARED = 3  # of a lane, if several warps share a row


def defines(dim: int) -> dict[str, int]:
    """`dim` is a multiple of 8 and at most `MAX_DIM`."""
    loads = -(-dim // _VALUES_PER_LOAD)
    alone = loads <= _LOADS_ALONE * 32
    warps = 1 if alone else -(-loads // (_LOADS_SHARED * 32))
    return {"DIM": dim, "WARPS": warps, "ROWS": _ROWS if alone else 1}


def has_e4m3(device: torch.device) -> bool:
    return runs(Kernels.TOWER_FP8, device)


def fits(x: torch.Tensor) -> bool:
    dim = x.shape[-1]
    if x.device.type != "cuda" or x.dtype != torch.bfloat16:
        return False
    return dim % _VALUES_PER_LOAD == 0 and dim <= MAX_DIM


def aligned(*tensors: torch.Tensor) -> bool:
    return all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in tensors)


def empty(x: torch.Tensor) -> Quantised:
    """Allocate an uninitialised result; a captured graph has its own."""
    scale = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    return Quantised(torch.empty_like(x, dtype=E4M3), scale)


class RowKernels:
    """Kernels of a source over rows of `dim`, on the current device."""

    def __init__(self, source: str, dim: int) -> None:
        constants = defines(dim)
        self._dim, self._rows = dim, constants["ROWS"]
        self._threads = 32 * constants["WARPS"] * self._rows
        self._module = Module(source, constants)

    def _launch(
        self, kernel: Kernel, operands: Sequence[Argument], count: int, *, overlap: bool
    ) -> None:
        """Enqueue over `count` rows, the kernel's last argument.

        `overlap` lets it begin early, which needs a kernel and no copy before it in the stream.
        """
        grid = (-(-count // self._rows), 1, 1)
        kernel.launch(grid, self._threads, (*operands, count), overlap=overlap)


class QuantiseKernels(RowKernels):
    """Quantisation, with or without a gelu before it."""

    def __init__(self, dim: int) -> None:
        super().__init__(SOURCE, dim)
        self.plain = self._module.kernel("quantise_plain")
        self.gelu = self._module.kernel("quantise_gelu")

    def launch(
        self, kernel: Kernel, x: torch.Tensor, *more: torch.Tensor, overlap: bool
    ) -> Quantised:
        x = x.contiguous()
        if not aligned(x):
            x, overlap = x.clone(), False
        out = empty(x)
        operands = (x, *more, out.values, out.scale)
        self._launch(kernel, operands, out.scale.numel(), overlap=overlap)
        return out


def kernels_for(x: torch.Tensor) -> QuantiseKernels | None:
    return made_on(x.device, QuantiseKernels, x.shape[-1]) if fits(x) else None
