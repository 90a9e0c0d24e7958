"""Low-rank adapters of a decode step's MLPs: B(A x) of each token's own slot.

Shape legend as in `decoder`; M values of a row whose first F are inner, S slots, R ranks of a slot,
or rows of the token state, O outputs.
"""

from __future__ import annotations

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


_Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The slots' own ranks, each row's slot (int64; 0 is none), and the tokens' rows."""


class LowRankMaps:
    """The kernels over the slots of all layers, and their scratch memory; steps must not overlap.

    A step's `slot_R` (int64) is the slot of each row, 0 for none.
    """

    def __init__(
        self, dim: int, ff_dim: int, layers: Sequence[MlpSlots], rank_S: torch.Tensor, max_rank: int
    ) -> None:
        """`rank_S`: the slots' own ranks. No address ever changes."""
        self._layers, self._rank_S = layers, rank_S
        self._shrink_in = _Shrink(dim, 1, max_rank, norm=True)
        self._shrink_out = _Shrink(ff_dim, _LONG_PARTS, max_rank, norm=False)
        self._expand_in = _expands(ff_dim, max_rank)
        self._expand_out = _expands(dim, max_rank)
        most, device = skinny_gemm.TILES[-1] * 8, rank_S.device
        self._low_BR = torch.zeros(most, max_rank, device=device)
        self._inner_BF = torch.zeros(most, ff_dim, device=device)
        self._outer_BD = torch.zeros(most, dim, device=device)

    def inner(
        self, layer: int, x_BD: torch.Tensor, slot_R: torch.Tensor, row_B: torch.Tensor
    ) -> torch.Tensor:
        """Compute the change of a layer's first map, [B, F] float32."""
        weights, rows = self._layers[layer], (self._rank_S, slot_R, row_B)
        inputs = x_BD, x_BD.shape[1], *weights.norm, weights.fc1.a_SRI
        self._shrink_in.launch(inputs, rows, self._low_BR)
        return self._expand(self._expand_in, weights.fc1, rows, self._inner_BF)

    def outer(
        self, layer: int, mixed_BM: torch.Tensor, slot_R: torch.Tensor, row_B: torch.Tensor
    ) -> torch.Tensor:
        """Compute that of its second map, [B, D] float32, for the first F of each row."""
        weights, rows = self._layers[layer], (self._rank_S, slot_R, row_B)
        inputs = mixed_BM, mixed_BM.shape[1], None, None, weights.fc2.a_SRI
        self._shrink_out.launch(inputs, rows, self._low_BR)
        return self._expand(self._expand_out, weights.fc2, rows, self._outer_BD)

    def _expand(
        self, kernels: Mapping[int, Kernel], weights: LowRankMap, rows: _Rows, change: torch.Tensor
    ) -> torch.Tensor:
        batch = len(rows[-1])
        tokens = 1 if batch == 1 else _TOKENS
        grid = weights.b_SRO.shape[-1] // _OUTPUTS, -(-batch // tokens), 1
        arguments = self._low_BR, weights.b_SRO, *rows, change, batch
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

    def launch(self, inputs: tuple[Argument, ...], rows: _Rows, low_BR: torch.Tensor) -> None:
        """Enqueue the kernel for this batch; `inputs` are its first arguments, up to A."""
        batch = len(rows[-1])
        tokens = 1 if batch == 1 else max(self._kernels)
        # As many turns as keep one wave of warps busy: each turn reads A once less.
        wave = skinny_gemm.num_processors() * 2 * self._pairs
        turns = min(_MOST_TURNS, max(1, self._max_rank * batch // wave))
        ranks = self._pairs // tokens
        grid = -(-self._max_rank // ranks), -(-batch // (tokens * turns)), 1
        arguments = *inputs, *rows, low_BR, batch, turns
        self._kernels[tokens].launch(grid, 32 * _WARPS, arguments, overlap=True)


def _expands(outputs: int, max_rank: int) -> dict[int, Kernel]:
    sizes = {"RANKS": max_rank, "OUTPUTS": outputs}
    return {
        tokens: Module("low_rank_adapters.cu", {**sizes, "TOKENS": tokens}).kernel("expand")
        for tokens in (1, _TOKENS)
    }
