"""Low-rank adapters of a decode step's MLPs: B(A x) of each token's own slot.

Shape legend as in `decoder`; M values of a row whose first F are inner, S slots, R ranks of a slot,
or rows of the token state, O outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from legato_engine.kernels.cuda import skinny_gemm
from legato_engine.kernels.cuda.module import Argument, Kernel, Module
from legato_engine.kernels.parameters import LowRankMap, MlpSlots

_WARPS = 8
_OUTPUTS = 64  # of a thread block
_TOKENS = 4  # of a thread block, for batches of several
_LONG_PARTS = 4  # of the inner activations, one warp each
_MOST_TURNS = 4


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """The slot of each row (int64), and the slots' own ranks; slot 0 is none."""

    slot_R: torch.Tensor
    rank_S: torch.Tensor


class LowRankMaps:
    """The kernels and their scratch memory; steps must not overlap."""

    def __init__(self, dim: int, ff_dim: int, max_rank: int, device: torch.device) -> None:
        self._max_rank = max_rank
        self._shrink_in = _Shrink(dim, 1, max_rank, norm=True)
        self._shrink_out = _Shrink(ff_dim, _LONG_PARTS, max_rank, norm=False)
        self._expand_in = _expands(ff_dim, max_rank)
        self._expand_out = _expands(dim, max_rank)
        most = skinny_gemm.TILES[-1] * 8
        self._low_BR = torch.zeros(most, max_rank, device=device)
        self._inner_BF = torch.zeros(most, ff_dim, device=device)
        self._outer_BD = torch.zeros(most, dim, device=device)

    def inner(
        self, x_BD: torch.Tensor, weights: MlpSlots, slots: Slots, row_B: torch.Tensor
    ) -> torch.Tensor:
        """Compute the first map's change, [B, F] float32."""
        inputs = x_BD, x_BD.shape[1], *weights.norm, weights.fc1.a_SRI
        self._shrink_in.launch(inputs, slots, row_B, self._low_BR)
        return self._expand(self._expand_in, weights.fc1, slots, row_B, self._inner_BF)

    def outer(
        self, mixed_BM: torch.Tensor, weights: MlpSlots, slots: Slots, row_B: torch.Tensor
    ) -> torch.Tensor:
        """Compute the second map's change, [B, D] float32, for the first F of each row."""
        inputs = mixed_BM, mixed_BM.shape[1], None, None, weights.fc2.a_SRI
        self._shrink_out.launch(inputs, slots, row_B, self._low_BR)
        return self._expand(self._expand_out, weights.fc2, slots, row_B, self._outer_BD)

    def _expand(
        self,
        kernels: Mapping[int, Kernel],
        weights: LowRankMap,
        slots: Slots,
        row_B: torch.Tensor,
        change: torch.Tensor,
    ) -> torch.Tensor:
        tokens = 1 if len(row_B) == 1 else _TOKENS
        grid = weights.b_SRO.shape[-1] // _OUTPUTS, -(-len(row_B) // tokens), 1
        named = slots.rank_S, slots.slot_R, row_B
        arguments = self._low_BR, weights.b_SRO, *named, change, len(row_B)
        kernels[tokens].launch(grid, 32 * _WARPS, arguments, overlap=True)
        return change


class _Shrink:
    """A x: a warp takes one rank and a part of the inputs; the grid does not affect the bits."""

    def __init__(self, width: int, parts: int, max_rank: int, *, norm: bool) -> None:
        self._max_rank = max_rank
        self._pairs = _WARPS // parts  # (rank, token) pairs of a thread block
        sizes = {"RANKS": max_rank, "WIDTH": width, "NORM": int(norm), "PARTS": parts}
        self._kernels = {
            tokens: Module("low_rank_adapters.cu", {**sizes, "TOKENS": tokens}).kernel("shrink")
            for tokens in {1, min(_TOKENS, self._pairs)}
        }

    def launch(
        self, inputs: tuple[Argument, ...], slots: Slots, row_B: torch.Tensor, low_BR: torch.Tensor
    ) -> None:
        """Enqueue the kernel for this batch; `inputs` are its first arguments, up to A."""
        batch = len(row_B)
        tokens = 1 if batch == 1 else max(self._kernels)
        # As many turns as keep one wave of warps busy: each turn reads A once less.
        wave = skinny_gemm.num_processors() * 2 * self._pairs
        turns = min(_MOST_TURNS, max(1, self._max_rank * batch // wave))
        ranks = self._pairs // tokens
        grid = -(-self._max_rank // ranks), -(-batch // (tokens * turns)), 1
        arguments = *inputs, slots.rank_S, slots.slot_R, row_B, low_BR, batch, turns
        self._kernels[tokens].launch(grid, 32 * _WARPS, arguments, overlap=True)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepAdapters:
    """The adapters of all layers for one step."""

    kernels: LowRankMaps
    layers: Sequence[MlpSlots]
    slots: Slots

    def inner(self, layer: int, x_BD: torch.Tensor, row_B: torch.Tensor) -> torch.Tensor:
        return self.kernels.inner(x_BD, self.layers[layer], self.slots, row_B)

    def outer(self, layer: int, mixed_BM: torch.Tensor, row_B: torch.Tensor) -> torch.Tensor:
        return self.kernels.outer(mixed_BM, self.layers[layer], self.slots, row_B)


def _expands(outputs: int, max_rank: int) -> dict[int, Kernel]:
    sizes = {"RANKS": max_rank, "OUTPUTS": outputs}
    return {
        tokens: Module("low_rank_adapters.cu", {**sizes, "TOKENS": tokens}).kernel("expand")
        for tokens in (1, _TOKENS)
    }
