"""Values that tokens carry, on the device: encoded for the next forward, decoded from the last.

Shape legend: B tokens, D width, R rows of the token state.
"""

from __future__ import annotations

import dataclasses

import torch

from legato_engine.kernels.cuda import streams
from legato_engine.kernels.cuda.decoder import MAX_TOKENS
from legato_engine.kernels.cuda.module import Module

_OUTPUTS = 64  # of `embed` per thread block
INNER_STAGES = {1: 9, 2: 6, 4: 4}
BINS_STAGES = {1: 9, 2: 7, 4: 4}
"""How deep the rings in shared memory are, by tiles."""


@dataclasses.dataclass(frozen=True, slots=True)
class RegionSizes:
    """What the kernels are compiled for; `size_bins` counts both sides."""

    dim: int
    inner_dim: int
    coord_features: int
    size_features: int
    coord_bins: int
    size_bins: int
    coord_token: int
    size_token: int

    @property
    def parts(self) -> int:
        """Parts that the inner activations are cut into."""
        return streams.num_parts(self.inner_dim, self.coord_bins)


@dataclasses.dataclass(frozen=True, slots=True)
class ValueWeights:
    """Encoder and decoder of one kind of value, bf16; the decoder's two maps are packed."""

    features: torch.Tensor
    encoder_weight: torch.Tensor
    encoder_bias: torch.Tensor
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


class Regions:
    """Embedding of tokens with their values, and the bins of values behind sampled tokens."""

    def __init__(
        self, sizes: RegionSizes, coord: ValueWeights, size: ValueWeights, device: torch.device
    ) -> None:
        self._sizes = sizes
        self._coord = coord
        self._size = size
        self._kernels = {}
        for tiles in streams.TILES:
            module = Module("region.cu", region_defines(sizes, tiles))
            shared = streams.whole_shared(sizes.dim, 8 * tiles, INNER_STAGES[tiles])
            inner = module.kernel("region_inner", shared=shared)
            shared = streams.parts_shared(
                sizes.inner_dim, sizes.parts, 8 * tiles, BINS_STAGES[tiles]
            )
            bins = module.kernel("region_bins", shared=shared)
            self._kernels[tiles] = module.kernel("embed"), inner, bins
        self._grid_inner = streams.even_grid(sizes.inner_dim // 16)
        self._inner_BF = torch.zeros(
            MAX_TOKENS, 2 * sizes.inner_dim, dtype=torch.bfloat16, device=device
        )
        self.coord_bins_BC = torch.zeros(MAX_TOKENS, sizes.coord_bins, device=device)
        self.size_bins_BC = torch.zeros(MAX_TOKENS, sizes.size_bins, device=device)

    def embed(self, inputs: TokenInputs, words_VD: torch.Tensor, x_BD: torch.Tensor) -> None:
        """Fill `x_BD`; the first kernel of a step."""
        batch = x_BD.shape[0]
        coord, size = self._coord, self._size
        kernel = self._kernels[streams.tiles_for(batch)][0]
        kernel.launch(
            (-(-self._sizes.dim // _OUTPUTS), batch, 1),
            streams.WORKERS,
            (
                *(inputs.source_B, inputs.row_token_R, inputs.row_payload_R2),
                *(inputs.prompt_token_B, inputs.prompt_payload_B2, words_VD),
                *(coord.features, coord.encoder_weight, coord.encoder_bias),
                *(size.features, size.encoder_weight, size.encoder_bias, x_BD),
            ),
        )

    def bins(self, token_B: torch.Tensor, hidden_BD: torch.Tensor) -> None:
        """Fill `coord_bins_BC` and `size_bins_BC`, each only if some token is of its kind."""
        batch = hidden_BD.shape[0]
        coord, size, sizes = self._coord, self._size, self._sizes
        tiles = streams.tiles_for(batch)
        _, inner, bins = self._kernels[tiles]
        inner.launch(
            (self._grid_inner, 1, 1),
            streams.THREADS,
            (
                *(token_B, hidden_BD, coord.fc1_weights, coord.fc1_bias),
                *(size.fc1_weights, size.fc1_bias, self._inner_BF, batch),
                INNER_STAGES[tiles],
            ),
            shared=streams.whole_shared(sizes.dim, batch, INNER_STAGES[tiles]),
            overlap=True,
        )
        bins.launch(
            ((sizes.coord_bins + sizes.size_bins) // 16, 1, 1),
            streams.THREADS,
            (
                *(token_B, self._inner_BF, coord.fc2_weights, coord.fc2_bias),
                *(size.fc2_weights, size.fc2_bias),
                *(self.coord_bins_BC, self.size_bins_BC, batch),
                BINS_STAGES[tiles],
            ),
            shared=streams.parts_shared(sizes.inner_dim, sizes.parts, batch, BINS_STAGES[tiles]),
            cluster=sizes.parts if streams.is_split(sizes.parts, tiles) else 1,
            overlap=True,
        )


def region_defines(sizes: RegionSizes, tiles: int) -> dict[str, int]:
    """Constants of `region.cu`."""
    return {
        "DIM": sizes.dim,
        "INNER": sizes.inner_dim,
        "COORD_BINS": sizes.coord_bins,
        "SIZE_BINS": sizes.size_bins,
        "COORD_FEATURES": sizes.coord_features,
        "SIZE_FEATURES": sizes.size_features,
        "COORD": sizes.coord_token,
        "SIZE": sizes.size_token,
        "PARTS": sizes.parts,
        "SPLIT": int(streams.is_split(sizes.parts, tiles)),
        "INPUT_STAGES": streams.INPUT_STAGES[tiles],
        "TILES": tiles,
    }
