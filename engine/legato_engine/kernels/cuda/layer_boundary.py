"""A few tokens' layers as two kernels each: one across the layer boundary, and attention.

Thread blocks of the first wait for each other, so all must run at once, one on a multiprocessor.

Shape legend as in `decoder`, but F inner width and D, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from legato_engine.kernels.cuda import skinny_gemm
from legato_engine.kernels.cuda.attention import Attention, StepPositions
from legato_engine.kernels.cuda.decoder_sizes import DecoderSizes, LayerWeights, layer_defines
from legato_engine.kernels.cuda.module import Kernel, Module

FEWEST_TOKENS = 2
MOST_TOKENS = 8
"""One token, and more than this, take a kernel for each end of a layer."""
STAGES = 8
"""Depth of the ring of weights."""

_THREADS = skinny_gemm.WORKERS + 64
"""The workers, a warp that reads weights and one that finishes blocks."""
_FEWEST_LAYERS = 3  # so that a layer's counters are zero again before they are read


class LayerBoundary:
    """The kernel, and its thread blocks' progress counters."""

    def __init__(self, sizes: DecoderSizes, num_layers: int, device: torch.device) -> None:
        self._num_layers = num_layers
        blocks = (3 * sizes.dim + sizes.ff_dim) // 16
        self._grid = max(skinny_gemm.even_grid(blocks, skinny_gemm.CLUSTER), sizes.dim // 16)
        self._kernel = _kernel(sizes) if num_layers >= _FEWEST_LAYERS else None
        shape = num_layers, 2, 32
        self._progress = torch.zeros(shape, dtype=torch.int32, device=device)

    def takes(self, batch: int) -> bool:
        there = self._kernel is not None and self._grid <= skinny_gemm.num_processors()
        return there and FEWEST_TOKENS <= batch <= MOST_TOKENS

    def run(
        self,
        x_BD: torch.Tensor,
        layers: Sequence[LayerWeights],
        positions: StepPositions,
        k_LNHSE: torch.Tensor,
        v_LNHSE: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        attention: Attention,
        q_BD: torch.Tensor,
        mixed_BF: torch.Tensor,
    ) -> None:
        """As `Decoder.layers`; `q_BD` and `mixed_BF` are scratch memory."""
        last, heads_BD = self._num_layers, mixed_BF[:, -q_BD.shape[1] :]
        assert len(layers) == last
        for index in range(last + 1):
            previous = layers[index - 1] if index > 0 else None
            following = layers[index] if index < last else None
            cache = (k_LNHSE[index], v_LNHSE[index]) if following else (None, None)
            self._launch(index, x_BD, previous, following, positions, cache, angles, q_BD, mixed_BF)
            if following:
                attention.launch(q_BD, k_LNHSE[index], v_LNHSE[index], positions, heads_BD)

    def _launch(
        self,
        index: int,
        x_BD: torch.Tensor,
        previous: LayerWeights | None,
        following: LayerWeights | None,
        positions: StepPositions,
        cache: tuple[torch.Tensor | None, torch.Tensor | None],
        angles: tuple[torch.Tensor, torch.Tensor],
        q_BD: torch.Tensor,
        mixed_BF: torch.Tensor,
    ) -> None:
        assert self._kernel is not None
        out = (
            (previous.weights_out, previous.proj_bias, previous.fc2_bias)
            if previous
            else (None,) * 3
        )
        into = (following.weights_in, following.folded_in) if following else (None,) * 2
        self._kernel.launch(
            (self._grid, 1, 1),
            _THREADS,
            (
                *(mixed_BF, *out, x_BD, *into),
                *(*angles, positions.row_B, positions.position_B, positions.table_RM),
                *(q_BD, *cache, self._progress),
                *(index, self._num_layers, x_BD.shape[0], STAGES),
            ),
            overlap=True,
        )


def supported(sizes: DecoderSizes) -> bool:
    return sizes.parts > 1 and sizes.dim <= sizes.mixed_dim // sizes.parts


def layer_boundary_defines(sizes: DecoderSizes) -> dict[str, int]:
    return layer_defines(sizes, tiles=1)


def shared_bytes(sizes: DecoderSizes) -> int:
    """One ring serves both maps."""
    width = max(skinny_gemm.chunk(sizes.dim), skinny_gemm.chunk(sizes.mixed_dim // sizes.parts))
    warps = skinny_gemm.WARPS * skinny_gemm.SUM
    sums = max(sizes.parts * warps, 2 * warps + skinny_gemm.SUM)
    return skinny_gemm.ring(16 * width, STAGES) + skinny_gemm.SUM_BARRIERS + sums


def _kernel(sizes: DecoderSizes) -> Kernel | None:
    """None if thread blocks would share a multiprocessor."""
    if not supported(sizes):
        return None
    module = Module("layer_boundary.cu", layer_boundary_defines(sizes))
    kernel = module.kernel("layer_boundary", shared=shared_bytes(sizes))
    return kernel if kernel.per_processor(_THREADS) == 1 else None
