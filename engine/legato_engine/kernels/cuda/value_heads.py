"""Values that tokens carry, on the device: encoded for the next forward, decoded from the last.

Shape legend: B tokens, D width, R rows of the token state, N bins.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from legato_engine.kernels.cuda import skinny_gemm
from legato_engine.kernels.cuda.decoder import MAX_TOKENS
from legato_engine.kernels.cuda.head import Head, HeadWeights
from legato_engine.kernels.cuda.module import Module

_OUTPUTS = 64  # of `embed` per thread block
INNER_STAGES = {1: 9, 2: 6, 3: 5, 4: 4}
BINS_STAGES = {1: 9, 2: 7, 3: 5, 4: 4}
"""How deep the rings in shared memory are, by tiles."""


@dataclasses.dataclass(frozen=True, slots=True)
class RegionSizes:
    """What the kernels are compiled for; `size_bins` counts both sides.

    `inner_dim` is that of decoders of two layers; None: all bins are one map behind a norm.
    """

    dim: int
    inner_dim: int | None
    coord_features: int
    size_features: int
    coord_bins: int
    size_bins: int
    coord_token: int
    size_token: int

    @property
    def parts(self) -> int:
        """Parts that the inner activations are cut into."""
        return skinny_gemm.num_parts(self.inner_dim or 0, self.coord_bins)


@dataclasses.dataclass(frozen=True, slots=True)
class EncoderWeights:
    """Of one kind of value, bf16."""

    features: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The two layers behind one kind of value, bf16; the maps are packed."""

    fc1_weights: torch.Tensor
    fc1_bias: torch.Tensor
    fc2_weights: torch.Tensor
    fc2_bias: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class TokenInputs:
    """B input tokens: row `source_B` of the state, or, where that is -1, the prompt's own entry."""

    source_B: torch.Tensor
    row_token_R: torch.Tensor
    row_payload_R2: torch.Tensor
    prompt_token_B: torch.Tensor
    prompt_payload_B2: torch.Tensor


class Embedder:
    """Tokens with their values, as the residual stream begins."""

    def __init__(self, sizes: RegionSizes, coord: EncoderWeights, size: EncoderWeights) -> None:
        self._sizes = sizes
        self._coord = coord
        self._size = size
        self._kernel = Module("embed.cu", embed_defines(sizes)).kernel("embed")

    def embed(self, inputs: TokenInputs, words_VD: torch.Tensor, x_BD: torch.Tensor) -> None:
        """Fill `x_BD`; the first kernel of a step."""
        coord, size = self._coord, self._size
        self._kernel.launch(
            (-(-self._sizes.dim // _OUTPUTS), x_BD.shape[0], 1),
            skinny_gemm.WORKERS,
            (
                *(inputs.source_B, inputs.row_token_R, inputs.row_payload_R2),
                *(inputs.prompt_token_B, inputs.prompt_payload_B2, words_VD),
                *(coord.features, coord.weight, coord.bias),
                *(size.features, size.weight, size.bias, x_BD),
            ),
        )


class Bins(Protocol):
    """Float32 logits of the bins behind sampled tokens: those that are likeliest are the value."""

    coord_bins_BN: torch.Tensor
    size_bins_BN: torch.Tensor

    def fill(self, token_B: torch.Tensor, hidden_BD: torch.Tensor) -> None:
        """Fill both; bins that no token needs may stay as they are."""
        ...


class NormedBins:
    """All bins as one map behind a norm: `weights` are those of coords, then those of sizes."""

    def __init__(self, sizes: RegionSizes, weights: HeadWeights, device: torch.device) -> None:
        num_bins = sizes.coord_bins + sizes.size_bins
        self._weights = weights
        self._head = Head(sizes.dim, num_bins)
        self._bins_BN = torch.zeros(MAX_TOKENS, num_bins, device=device)
        self.coord_bins_BN = self._bins_BN[:, : sizes.coord_bins]
        self.size_bins_BN = self._bins_BN[:, sizes.coord_bins :]

    def fill(self, token_B: torch.Tensor, hidden_BD: torch.Tensor) -> None:
        """See `Bins`."""
        self._head.run(hidden_BD, self._weights, self._bins_BN)


class MlpBins:
    """Two layers behind each kind of value; only those that some token needs run."""

    def __init__(
        self, sizes: RegionSizes, coord: DecoderWeights, size: DecoderWeights, device: torch.device
    ) -> None:
        assert sizes.inner_dim is not None, "decoders of two layers have an inner width"
        self._sizes = sizes
        self._coord = coord
        self._size = size
        self._kernels = {}
        for tiles in skinny_gemm.TILES:
            module = Module("region.cu", region_defines(sizes, tiles))
            shared = skinny_gemm.whole_shared(sizes.dim, 8 * tiles, INNER_STAGES[tiles])
            inner = module.kernel("region_inner", shared=shared)
            shared = skinny_gemm.parts_shared(
                sizes.inner_dim, sizes.parts, 8 * tiles, BINS_STAGES[tiles]
            )
            self._kernels[tiles] = inner, module.kernel("region_bins", shared=shared)
        self._grid_inner = skinny_gemm.even_grid(sizes.inner_dim // 16)
        self._inner_BF = torch.zeros(
            MAX_TOKENS, 2 * sizes.inner_dim, dtype=torch.bfloat16, device=device
        )
        self.coord_bins_BN = torch.zeros(MAX_TOKENS, sizes.coord_bins, device=device)
        self.size_bins_BN = torch.zeros(MAX_TOKENS, sizes.size_bins, device=device)

    def fill(self, token_B: torch.Tensor, hidden_BD: torch.Tensor) -> None:
        """See `Bins`."""
        batch = hidden_BD.shape[0]
        coord, size, sizes = self._coord, self._size, self._sizes
        inner_dim = self._inner_BF.shape[1] // 2
        tiles = skinny_gemm.tiles_for(batch)
        inner, bins = self._kernels[tiles]
        inner.launch(
            (self._grid_inner, 1, 1),
            skinny_gemm.THREADS,
            (
                *(token_B, hidden_BD, coord.fc1_weights, coord.fc1_bias),
                *(size.fc1_weights, size.fc1_bias, self._inner_BF, batch),
                INNER_STAGES[tiles],
            ),
            shared=skinny_gemm.whole_shared(sizes.dim, batch, INNER_STAGES[tiles]),
            overlap=True,
        )
        bins.launch(
            ((sizes.coord_bins + sizes.size_bins) // 16, 1, 1),
            skinny_gemm.THREADS,
            (
                *(token_B, self._inner_BF, coord.fc2_weights, coord.fc2_bias),
                *(size.fc2_weights, size.fc2_bias),
                *(self.coord_bins_BN, self.size_bins_BN, batch),
                BINS_STAGES[tiles],
            ),
            shared=skinny_gemm.parts_shared(inner_dim, sizes.parts, batch, BINS_STAGES[tiles]),
            cluster=_cluster(sizes, tiles),
            overlap=True,
        )


def _cluster(sizes: RegionSizes, tiles: int) -> int:
    return skinny_gemm.CLUSTER if sizes.parts > 1 and tiles > 1 else 1


def embed_defines(sizes: RegionSizes) -> dict[str, int]:
    """Constants of `embed.cu`."""
    return {
        "DIM": sizes.dim,
        "COORD_FEATURES": sizes.coord_features,
        "SIZE_FEATURES": sizes.size_features,
        "COORD": sizes.coord_token,
        "SIZE": sizes.size_token,
    }


def region_defines(sizes: RegionSizes, tiles: int) -> dict[str, int]:
    """Constants of `region.cu`, for decoders of two layers."""
    return {
        "DIM": sizes.dim,
        "INNER": sizes.inner_dim or 0,
        "COORD_BINS": sizes.coord_bins,
        "SIZE_BINS": sizes.size_bins,
        "COORD": sizes.coord_token,
        "SIZE": sizes.size_token,
        "PARTS": sizes.parts,
        "CLUSTER": _cluster(sizes, tiles),
        "INPUT_STAGES": skinny_gemm.INPUT_STAGES[tiles],
        "TILES": tiles,
    }
