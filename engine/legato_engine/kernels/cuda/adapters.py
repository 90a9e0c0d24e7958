"""Adapters in a decode step: what B(A x) adds to both maps of a layer's MLP, each token its own.

Shape legend: B tokens, D width, F inner width, M values of a row whose last F are inner, I and O a
map's inputs and outputs, S slots, R ranks of a slot's room, or rows of the token state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from legato_engine.kernels.cuda import streams
from legato_engine.kernels.cuda.module import Argument, Kernel, Module

_WARPS = 8
_OUTPUTS = 64  # of a thread block


@dataclasses.dataclass(frozen=True, slots=True)
class _Shape:
    """Tokens of a thread block, and parts that the inputs of one are cut into, a warp each."""

    tokens: int
    parts: int = 1

    @property
    def ranks(self) -> int:
        """Of a thread block."""
        return _WARPS // (self.tokens * self.parts)


_SHRINK_IN, _SHRINK_OUT, _EXPAND = _Shape(4), _Shape(2, parts=4), _Shape(4)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """Which slot each row reads, int64, and the slots' own ranks; slot 0 is none."""

    slot_R: torch.Tensor
    rank_S: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Map:
    """A layer's slots for one map, bf16: A [S, R, inputs] and B [S, R, outputs]."""

    a_SRI: torch.Tensor
    b_SRO: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerAdapters:
    """A layer's slots, and the scale and shift of the norm that its MLP reads."""

    norm: tuple[torch.Tensor, torch.Tensor]
    first: Map
    second: Map


class LowRank:
    """The kernels for one model's MLPs, and the memory between them; steps must not overlap."""

    def __init__(self, dim: int, ff_dim: int, max_rank: int, device: torch.device) -> None:
        self._max_rank = max_rank
        self._shrink_in = _shrink(dim, _SHRINK_IN, max_rank, norm=True)
        self._shrink_out = _shrink(ff_dim, _SHRINK_OUT, max_rank, norm=False)
        self._expand_in = _expand(ff_dim, max_rank)
        self._expand_out = _expand(dim, max_rank)
        most = streams.TILES[-1] * 8
        self._low_BR = torch.zeros(most, max_rank, device=device)
        self._inner_BF = torch.zeros(most, ff_dim, device=device)
        self._outer_BD = torch.zeros(most, dim, device=device)

    def inner(
        self, x_BD: torch.Tensor, weights: LayerAdapters, slots: Slots, row_B: torch.Tensor
    ) -> torch.Tensor:
        """[B, F] float32: what the first map gives more for the norm of the residual stream."""
        inputs = x_BD, x_BD.shape[1], *weights.norm, weights.first.a_SRI
        self._shrink(self._shrink_in, _SHRINK_IN, inputs, slots, row_B)
        return self._expand(self._expand_in, weights.first, slots, row_B, self._inner_BF)

    def outer(
        self, mixed_BM: torch.Tensor, weights: LayerAdapters, slots: Slots, row_B: torch.Tensor
    ) -> torch.Tensor:
        """[B, D] float32: the same of the second map; its inputs are the last F of each row."""
        stride, a_SRF = mixed_BM.shape[1], weights.second.a_SRI
        inputs = mixed_BM[:, stride - a_SRF.shape[-1] :], stride, None, None, a_SRF
        self._shrink(self._shrink_out, _SHRINK_OUT, inputs, slots, row_B)
        return self._expand(self._expand_out, weights.second, slots, row_B, self._outer_BD)

    def _shrink(
        self,
        kernel: Kernel,
        shape: _Shape,
        inputs: tuple[Argument, ...],
        slots: Slots,
        row_B: torch.Tensor,
    ) -> None:
        grid = -(-self._max_rank // shape.ranks), -(-len(row_B) // shape.tokens), 1
        named = slots.rank_S, slots.slot_R, row_B
        arguments = *inputs, *named, self._low_BR, len(row_B)
        kernel.launch(grid, 32 * _WARPS, arguments, overlap=True)

    def _expand(
        self, kernel: Kernel, weights: Map, slots: Slots, row_B: torch.Tensor, change: torch.Tensor
    ) -> torch.Tensor:
        grid = weights.b_SRO.shape[-1] // _OUTPUTS, -(-len(row_B) // _EXPAND.tokens), 1
        named = slots.rank_S, slots.slot_R, row_B
        arguments = self._low_BR, weights.b_SRO, *named, change, len(row_B)
        kernel.launch(grid, 32 * _WARPS, arguments, overlap=True)
        return change


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepAdapters:
    """All layers' adapters for one step."""

    kernels: LowRank
    layers: Sequence[LayerAdapters]
    slots: Slots

    def inner(self, layer: int, x_BD: torch.Tensor, row_B: torch.Tensor) -> torch.Tensor:
        """See `LowRank`."""
        return self.kernels.inner(x_BD, self.layers[layer], self.slots, row_B)

    def outer(self, layer: int, mixed_BM: torch.Tensor, row_B: torch.Tensor) -> torch.Tensor:
        """See `LowRank`."""
        return self.kernels.outer(mixed_BM, self.layers[layer], self.slots, row_B)


def _shrink(width: int, shape: _Shape, max_rank: int, *, norm: bool) -> Kernel:
    sizes = {"RANKS": max_rank, "WIDTH": width, "NORM": int(norm)}
    defines = {**sizes, "PARTS": shape.parts, "TOKENS": shape.tokens}
    return Module("adapter.cu", defines).kernel("shrink")


def _expand(outputs: int, max_rank: int) -> Kernel:
    defines = {"RANKS": max_rank, "OUTPUTS": outputs, "TOKENS": _EXPAND.tokens}
    return Module("adapter.cu", defines).kernel("expand")
