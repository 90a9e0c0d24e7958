"""A map of the normed residual stream to float32 logits.

Shape legend: B tokens, D width, V outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from legato_engine.kernels.cuda import skinny_gemm
from legato_engine.kernels.cuda.module import Module

HEAD_STAGES = {1: 9, 2: 7, 3: 5, 4: 4}
"""Depths of the ring in shared memory, by tiles."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeadWeights:
    """The packed bf16 map, with the preceding norm folded in."""

    weights: torch.Tensor
    folded: torch.Tensor


class Head:
    """Kernels for up to 32 tokens."""

    def __init__(self, dim: int, num_outputs: int, stages: Mapping[int, int] = HEAD_STAGES) -> None:
        self._dim = dim
        self._stages = stages
        self._grid = skinny_gemm.even_grid(num_outputs // 16)
        self._kernels = {
            tiles: Module("head.cu", head_defines(dim, num_outputs, tiles)).kernel(
                "head", shared=skinny_gemm.whole_shared(dim, 8 * tiles, stages[tiles])
            )
            for tiles in skinny_gemm.TILES
        }

    def run(self, x_BD: torch.Tensor, weights: HeadWeights, logits_BV: torch.Tensor) -> None:
        batch = x_BD.shape[0]
        tiles = skinny_gemm.tiles_for(batch)
        stages = self._stages[tiles]
        self._kernels[tiles].launch(
            (self._grid, 1, 1),
            skinny_gemm.FINISHING,
            (x_BD, weights.weights, weights.folded, logits_BV, batch, stages),
            shared=skinny_gemm.whole_shared(self._dim, batch, stages),
            overlap=True,
        )


def head_defines(dim: int, num_outputs: int, tiles: int) -> dict[str, int]:
    return {"DIM": dim, "VOCAB": num_outputs, "TILES": tiles}
