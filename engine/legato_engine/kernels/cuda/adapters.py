"""Low-rank adapters of a decode step's MLPs: B(A x) of each token's own slot.

Shape legend as in `decoder`; M values of a row whose first F are inner, S slots, R ranks of a slot,
or rows of the token state, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from legato_engine.kernels.cuda import skinny_gemm
from legato_engine.kernels.cuda.module import Argument, Kernel, Module
from legato_engine.kernels.parameters import LowRankMap, MlpSlots

MAX_DOT_RANK = 64
"""Banks up to this rank are multiplied by dot products, others by tensor cores."""

_WARPS = 8
_OUTPUTS = 64  # of a thread block
_TOKENS = 4  # of a thread block, for batches of several
_LONG_PARTS = 4  # of the inner activations, one warp each
_MOST_TURNS = 4
_BLOCK = 16  # ranks of a product on tensor cores
_TILE = 8  # tokens of one slot, likewise


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
        kernels: type[_Dots | _Tiles] = _Dots if max_rank <= MAX_DOT_RANK else _Tiles
        self._inner = kernels(dim, ff_dim, max_rank, norm=True)
        self._outer = kernels(ff_dim, dim, max_rank, norm=False)
        most, device = skinny_gemm.TILES[-1] * 8, rank_S.device
        self._low_BR = torch.zeros(most, -(-max_rank // _BLOCK) * _BLOCK, device=device)
        self._inner_BF = torch.zeros(most, ff_dim, device=device)
        self._outer_BD = torch.zeros(most, dim, device=device)

    def inner(
        self, layer: int, x_BD: torch.Tensor, slot_R: torch.Tensor, row_B: torch.Tensor
    ) -> torch.Tensor:
        """Compute the change of a layer's first map, [B, F] float32."""
        weights, rows = self._layers[layer], (self._rank_S, slot_R, row_B)
        inputs = x_BD, x_BD.shape[1], *weights.norm
        self._inner.launch(inputs, weights.fc1, rows, self._low_BR, self._inner_BF)
        return self._inner_BF

    def outer(
        self, layer: int, mixed_BM: torch.Tensor, slot_R: torch.Tensor, row_B: torch.Tensor
    ) -> torch.Tensor:
        """Compute that of its second map, [B, D] float32, for the first F of each row."""
        inputs, rows = (mixed_BM, mixed_BM.shape[1], None, None), (self._rank_S, slot_R, row_B)
        weights = self._layers[layer].fc2
        self._outer.launch(inputs, weights, rows, self._low_BR, self._outer_BD)
        return self._outer_BD


# A map's two kernels, A x and then B times that; the grid does not affect the bits. `launch`
# enqueues both for a batch; its `inputs` are the first kernel's arguments up to A.


class _Dots:
    """Kernels whose warps take one rank and a part of the inputs."""

    def __init__(self, inputs: int, outputs: int, max_rank: int, *, norm: bool) -> None:
        parts = 1 if norm else _LONG_PARTS
        self._max_rank, self._outputs = max_rank, outputs
        self._pairs = _WARPS // parts  # (rank, token) pairs of a thread block
        shrink = {"RANKS": max_rank, "WIDTH": inputs, "NORM": int(norm), "PARTS": parts}
        expand = {"RANKS": max_rank, "OUTPUTS": outputs}
        self._shrink = _by_tokens("shrink", shrink, min(_TOKENS, self._pairs))
        self._expand = _by_tokens("expand", expand, _TOKENS)

    def launch(
        self,
        inputs: tuple[Argument, ...],
        weights: LowRankMap,
        rows: _Rows,
        low_BR: torch.Tensor,
        change_BO: torch.Tensor,
    ) -> None:
        batch = len(rows[-1])
        tokens = 1 if batch == 1 else max(self._shrink)
        # As many turns as keep one wave of warps busy: each turn reads A once less.
        wave = skinny_gemm.num_processors() * 2 * self._pairs
        turns = min(_MOST_TURNS, max(1, self._max_rank * batch // wave))
        ranks = self._pairs // tokens
        grid = -(-self._max_rank // ranks), -(-batch // (tokens * turns)), 1
        arguments: tuple[Argument, ...] = (*inputs, weights.a_SRI, *rows, low_BR, batch, turns)
        self._shrink[tokens].launch(grid, 32 * _WARPS, arguments, overlap=True)
        tokens = 1 if batch == 1 else _TOKENS
        grid = self._outputs // _OUTPUTS, -(-batch // tokens), 1
        arguments = low_BR, weights.b_SRO, *rows, change_BO, batch
        self._expand[tokens].launch(grid, 32 * _WARPS, arguments, overlap=True)


def _by_tokens(name: str, sizes: dict[str, int], most: int) -> dict[int, Kernel]:
    return {
        tokens: Module("low_rank_adapters.cu", {**sizes, "TOKENS": tokens}).kernel(name)
        for tokens in {1, most}
    }


class _Tiles:
    """Kernels whose thread blocks take up to 8 tokens of one slot, and 16 ranks or some outputs."""

    def __init__(self, inputs: int, outputs: int, max_rank: int, *, norm: bool) -> None:
        shrink, expand = tile_defines(inputs, outputs, max_rank, norm=norm)
        self._blocks = -(-max_rank // _BLOCK), outputs // expand["OUTS"]
        self._shrink = Module("adapter_tiles.cu", shrink).kernel("shrink")
        self._expand = Module("adapter_tiles.cu", expand).kernel("expand")

    def launch(
        self,
        inputs: tuple[Argument, ...],
        weights: LowRankMap,
        rows: _Rows,
        low_BR: torch.Tensor,
        change_BO: torch.Tensor,
    ) -> None:
        batch = len(rows[-1])
        named = min(len(rows[0]) - 1, batch)
        tiles = named + (batch - named) // _TILE  # at most: one of each slot, then full ones
        for kernel, blocks, arguments in (
            (self._shrink, self._blocks[0], (*inputs, weights.a_SRI, *rows, low_BR)),
            (self._expand, self._blocks[1], (low_BR, weights.b_SRO, *rows, change_BO)),
        ):
            kernel.launch((blocks, tiles, 1), 32 * _WARPS, (*arguments, batch), overlap=True)


def tile_defines(
    inputs: int, outputs: int, max_rank: int, *, norm: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the constants of a map's two kernels on tensor cores."""
    shrink = {"RANKS": max_rank, "WIDTH": inputs, "NORM": int(norm)}
    expand = {"RANKS": max_rank, "OUTPUTS": outputs, "OUTS": 64 if outputs >= 4096 else 32}
    return shrink, expand
