"""Activations to e4m3 with one scale per row: kernels, and the same in torch beside them.

Each row is divided by its scale, amax / 448, after what came before it (a gelu here, a layer norm
in `norm`), which is done in float32 and not rounded in between.

Shape legend: T rows, K values of a row; `...` any leading dimensions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from legato_engine.kernels.cuda.module import Argument, Kernel, Module

E4M3 = torch.float8_e4m3fn
SOURCE = "quantise.cu"
MAX_DIM = 8192
FIRST_WITH_E4M3 = (8, 9)  # compute capability

_LARGEST = 448.0
_FLOOR = 1e-12
_VALUES_PER_LOAD = 8
_ALIGNMENT = 16  # bytes of a load
_ROWS = 4  # of a thread block whose warps have a row each; its place is free after the last
_LOADS_ALONE = 5  # of a lane, at most, where one warp has a row
_LOADS_SHARED = 3  # of a lane where several warps share a row


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """`values` e4m3 [..., K]; `scale` float32 [..., 1] is what a row is to be multiplied by."""

    values: torch.Tensor
    scale: torch.Tensor


def plain(x: torch.Tensor) -> Quantised:
    """[..., K] as it is."""
    if (kernels := _kernels_for(x)) is None:
        return reference(x)
    return kernels.launch(kernels.plain, x, overlap=False)


def gelu(x: torch.Tensor) -> Quantised:
    """The gelu (tanh form) of [..., K], which a kernel and no copy has written."""
    if (kernels := _kernels_for(x)) is None:
        return reference_gelu(x)
    return kernels.launch(kernels.gelu, x, overlap=True)


def reference(x: torch.Tensor) -> Quantised:
    """See `plain`."""
    x = x.float()
    amax = x.abs().amax(-1, keepdim=True).clamp_min(_FLOOR)
    values = (x * (amax.reciprocal() * _LARGEST)).clamp(-_LARGEST, _LARGEST)
    return Quantised(values.to(E4M3), amax * (1.0 / _LARGEST))


def reference_gelu(x: torch.Tensor) -> Quantised:
    """See `gelu`."""
    return reference(F.gelu(x.float(), approximate="tanh"))


def can_multiply(device: torch.device) -> bool:
    """Whether matrices of e4m3 can be multiplied there; by emulation on the CPU."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= FIRST_WITH_E4M3


def defines(dim: int) -> dict[str, int]:
    """The constants of a source over rows of `dim`, a multiple of 8 and at most `MAX_DIM`."""
    loads = -(-dim // _VALUES_PER_LOAD)
    alone = loads <= _LOADS_ALONE * 32
    warps = 1 if alone else -(-loads // (_LOADS_SHARED * 32))
    return {"DIM": dim, "WARPS": warps, "ROWS": _ROWS if alone else 1}


def fits(x: torch.Tensor) -> bool:
    """Whether kernels take rows of [..., K]: bf16 on a GPU, of a length that they know."""
    dim = x.shape[-1]
    if x.device.type != "cuda" or x.dtype != torch.bfloat16:
        return False
    return dim % _VALUES_PER_LOAD == 0 and dim <= MAX_DIM


def aligned(*tensors: torch.Tensor) -> bool:
    """Whether kernels can load from the first value of each on."""
    return all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in tensors)


def empty(x: torch.Tensor) -> Quantised:
    """Room for the rows of [..., K]; a captured graph has its own."""
    scale = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    return Quantised(torch.empty_like(x, dtype=E4M3), scale)


class RowModule:
    """A source over rows of `dim` bf16 values, compiled for the current device."""

    def __init__(self, source: str, dim: int) -> None:
        constants = defines(dim)
        self._module = Module(source, constants)
        self._rows = constants["ROWS"]
        self._threads = 32 * constants["WARPS"] * self._rows

    def kernel(self, name: str) -> Kernel:
        """One of its kernels."""
        return self._module.kernel(name)

    def launch(
        self, kernel: Kernel, operands: Sequence[Argument], count: int, *, overlap: bool
    ) -> None:
        """Enqueue it over `count` rows, a number that it takes behind the operands.

        `overlap` says that a kernel is in front and no copy, so that this one may begin early.
        """
        grid = (-(-count // self._rows), 1, 1)
        kernel.launch(grid, self._threads, (*operands, count), overlap=overlap)


class QuantiseKernels:
    """The kernels for rows of `dim` bf16 values, on the current device."""

    def __init__(self, dim: int) -> None:
        self._module = RowModule(SOURCE, dim)
        self.plain = self._module.kernel("quantise_plain")
        self.gelu = self._module.kernel("quantise_gelu")

    def launch(self, kernel: Kernel, x: torch.Tensor, *, overlap: bool) -> Quantised:
        """Enqueue one of them; `overlap` as in `RowModule`."""
        x = x.contiguous()
        if not aligned(x):
            x, overlap = x.clone(), False
        out = empty(x)
        self._module.launch(kernel, (x, out.values, out.scale), out.scale.numel(), overlap=overlap)
        return out


def _kernels_for(x: torch.Tensor) -> QuantiseKernels | None:
    """None where torch does it."""
    return _compiled(x.shape[-1], x.device) if fits(x) else None


@functools.cache
def _compiled(dim: int, device: torch.device) -> QuantiseKernels:
    with torch.cuda.device(device):
        return QuantiseKernels(dim)
