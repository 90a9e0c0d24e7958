"""Values carried by tokens: encoded into the next forward's inputs, decoded from the last hidden.

A `scalar` token carries one value, a `pair` token two. A value is encoded by Fourier features and a
linear map, and decoded as its likeliest bin.

Shape legend: B tokens, D width, R rows of the token state, N bins, S bins of both of a pair's
values.
"""

from __future__ import annotations

import dataclasses

import torch

from legato_engine.kernels.cuda import skinny_gemm
from legato_engine.kernels.cuda.attention import MAX_TOKENS
from legato_engine.kernels.cuda.decoder import HeadWeights, LogitsHead
from legato_engine.kernels.cuda.module import Module
from legato_engine.kernels.cuda.sampling import RowTensors, SampledTokens
from legato_engine.kernels.parameters import Affine

_OUTPUTS = 64  # of `embed` per thread block
_READER_THREADS = 64
INNER_STAGES = {1: 9, 2: 6, 3: 5, 4: 4}
BINS_STAGES = {1: 9, 2: 7, 3: 5, 4: 4}
"""Depths of the rings in shared memory, by tiles."""


@dataclasses.dataclass(frozen=True, slots=True)
class ValueSizes:
    """Constants of the kernels; `pair_bins` counts the bins of both values.

    Bin b of a scalar means b / `scalar_divisor`; bins of a pair are spread by logarithm over 2^-10
    .. 1. Bins up to a reach from the likeliest count as close to it. `inner_dim` is that of
    two-layer decoders; None: all bins are one map.
    """

    dim: int
    inner_dim: int | None
    scalar_features: int
    pair_features: int
    scalar_bins: int
    pair_bins: int
    scalar_divisor: int
    scalar_token: int
    pair_token: int
    end_token: int
    scalar_reach: int
    pair_reach: int
    vocab: int

    @property
    def parts(self) -> int:
        return skinny_gemm.num_parts(self.inner_dim or 0, self.scalar_bins)


@dataclasses.dataclass(frozen=True, slots=True)
class ValueEncoder:
    """One kind's encoder, bf16: Fourier frequencies, and the map of their features."""

    features: torch.Tensor
    map: Affine


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderWeights:
    """One kind's two-layer decoder, bf16 with packed maps."""

    fc1_weights: torch.Tensor
    fc1_bias: torch.Tensor
    fc2_weights: torch.Tensor
    fc2_bias: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class TwoLayerValues:
    """Encoders and decoders of both kinds, as the kernels of a step have them."""

    sizes: ValueSizes
    scalar: tuple[ValueEncoder, DecoderWeights]
    pair: tuple[ValueEncoder, DecoderWeights]

    @property
    def inner_dim(self) -> int:
        assert self.sizes.inner_dim is not None, "decoders of two layers have an inner width"
        return self.sizes.inner_dim


@dataclasses.dataclass(frozen=True, slots=True)
class TokenInputs:
    """B input tokens: row `source_B` of the state, or the prompt's entry b where that is -1."""

    source_B: torch.Tensor
    row_token_R: torch.Tensor
    row_payload_R2: torch.Tensor
    prompt_token_B: torch.Tensor
    prompt_payload_B2: torch.Tensor


class Embedder:
    """Writes the first residual stream."""

    def __init__(self, sizes: ValueSizes, scalar: ValueEncoder, pair: ValueEncoder) -> None:
        self._sizes = sizes
        self._scalar = scalar
        self._pair = pair
        self._kernel = Module("embed.cu", embed_defines(sizes)).kernel("embed")

    def embed(self, inputs: TokenInputs, words_VD: torch.Tensor, x_BD: torch.Tensor) -> None:
        """Enqueue the first kernel of a step: it embeds the tokens."""
        self._kernel.launch(
            (-(-self._sizes.dim // _OUTPUTS), x_BD.shape[0], 1),
            skinny_gemm.WORKERS,
            (
                *(inputs.source_B, inputs.row_token_R, inputs.row_payload_R2),
                *(inputs.prompt_token_B, inputs.prompt_payload_B2, words_VD),
                *(self._scalar.features, *self._scalar.map),
                *(self._pair.features, *self._pair.map, x_BD),
            ),
        )


class NormedBins:
    """All bins as one map of the normed hidden."""

    def __init__(self, sizes: ValueSizes, weights: HeadWeights, device: torch.device) -> None:
        num_bins = sizes.scalar_bins + sizes.pair_bins
        self._head = LogitsHead(weights, sizes.dim, num_bins)
        self.max_tokens = self._head.max_tokens
        self._bins_BN = torch.zeros(MAX_TOKENS, num_bins, device=device)
        self.scalar_bins_BN = self._bins_BN[:, : sizes.scalar_bins]
        self.pair_bins_BS = self._bins_BN[:, sizes.scalar_bins :]

    def fill(self, token_B: torch.Tensor, hidden_BD: torch.Tensor) -> None:
        self._head.run(hidden_BD, self._bins_BN)


class MlpBins:
    """A decoder for each kind of token; one that no token needs does not run."""

    def __init__(
        self, sizes: ValueSizes, scalar: DecoderWeights, pair: DecoderWeights, device: torch.device
    ) -> None:
        assert sizes.inner_dim is not None, "decoders of two layers have an inner width"
        self._sizes = sizes
        self.scalar, self.pair = scalar, pair
        self._kernels = {}
        self._inner_stages, self._bins_stages = value_stages(sizes)
        self.max_tokens = skinny_gemm.most_tokens(self._inner_stages, self._bins_stages)
        for tiles in skinny_gemm.tiles_up_to(self.max_tokens):
            module = Module("value_bins.cu", value_bins_defines(sizes, tiles))
            shared = skinny_gemm.whole_shared(sizes.dim, 8 * tiles, self._inner_stages[tiles])
            inner = module.kernel("value_inner", shared=shared)
            shared = skinny_gemm.parts_shared(
                sizes.inner_dim, sizes.parts, 8 * tiles, self._bins_stages[tiles]
            )
            self._kernels[tiles] = inner, module.kernel("value_bins", shared=shared)
        self._grid_inner = skinny_gemm.even_grid(sizes.inner_dim // 16)
        self._inner_BF = torch.zeros(
            MAX_TOKENS, 2 * sizes.inner_dim, dtype=torch.bfloat16, device=device
        )
        self.scalar_bins_BN = torch.zeros(MAX_TOKENS, sizes.scalar_bins, device=device)
        self.pair_bins_BS = torch.zeros(MAX_TOKENS, sizes.pair_bins, device=device)

    def fill(self, token_B: torch.Tensor, hidden_BD: torch.Tensor) -> None:
        batch = hidden_BD.shape[0]
        scalar, pair, sizes = self.scalar, self.pair, self._sizes
        inner_dim = self._inner_BF.shape[1] // 2
        tiles = skinny_gemm.tiles_for(batch)
        inner, bins = self._kernels[tiles]
        inner_stages, bins_stages = self._inner_stages[tiles], self._bins_stages[tiles]
        inner.launch(
            (self._grid_inner, 1, 1),
            skinny_gemm.finishing_threads(skinny_gemm.held_rounds(sizes.dim, tiles)),
            (
                *(token_B, hidden_BD, scalar.fc1_weights, scalar.fc1_bias),
                *(pair.fc1_weights, pair.fc1_bias, self._inner_BF, batch),
                inner_stages,
            ),
            shared=skinny_gemm.whole_shared(sizes.dim, batch, inner_stages),
            overlap=True,
        )
        bins.launch(
            ((sizes.scalar_bins + sizes.pair_bins) // 16, 1, 1),
            skinny_gemm.THREADS,
            (
                *(token_B, self._inner_BF, scalar.fc2_weights, scalar.fc2_bias),
                *(pair.fc2_weights, pair.fc2_bias),
                *(self.scalar_bins_BN, self.pair_bins_BS, batch),
                bins_stages,
            ),
            shared=skinny_gemm.parts_shared(inner_dim, sizes.parts, batch, bins_stages),
            cluster=_cluster(sizes, tiles),
            overlap=True,
        )


class ValueReader:
    """Reads the values of tokens, and their confidence, from the logits of their bins.

    Can be captured.
    """

    def __init__(self, sizes: ValueSizes) -> None:
        self._kernel = Module("value_argmax.cu", value_argmax_defines(sizes)).kernel("value_argmax")

    def read(
        self,
        state: RowTensors,
        scalar_BN: torch.Tensor,
        pair_BS: torch.Tensor,
        sampled: SampledTokens,
        *,
        overlap: bool = True,
    ) -> None:
        """Rows of the float32 bins may be strided, by multiples of 4."""
        self._kernel.launch(
            (len(sampled.payload_B2), 1, 1),
            _READER_THREADS,
            [
                *(scalar_BN, pair_BS, sampled.row_B, state.token_R),
                *(sampled.logits_BV, sampled.constraints_CV),
                *(sampled.constraint_S, sampled.entry_B),
                *(state.payload_R2, sampled.payload_B2, sampled.certainty_B2),
                *(scalar_BN.stride(0), pair_BS.stride(0)),
            ],
            overlap=overlap,
        )


def value_stages(sizes: ValueSizes) -> tuple[dict[int, int], dict[int, int]]:
    """Depths of both rings on the current GPU."""
    inner_dim = sizes.inner_dim
    assert inner_dim is not None, "decoders of two layers have an inner width"

    def inner(tiles: int, depth: int) -> int:
        return skinny_gemm.whole_shared(sizes.dim, 8 * tiles, depth)

    def bins(tiles: int, depth: int) -> int:
        return skinny_gemm.parts_shared(inner_dim, sizes.parts, 8 * tiles, depth)

    return skinny_gemm.fitting(INNER_STAGES, inner), skinny_gemm.fitting(BINS_STAGES, bins)


def _cluster(sizes: ValueSizes, tiles: int) -> int:
    return skinny_gemm.clusters() if sizes.parts > 1 and tiles > 1 else 1


def embed_defines(sizes: ValueSizes) -> dict[str, int]:
    return {
        "DIM": sizes.dim,
        "SCALAR_FEATURES": sizes.scalar_features,
        "PAIR_FEATURES": sizes.pair_features,
        "SCALAR": sizes.scalar_token,
        "PAIR": sizes.pair_token,
    }


def value_bins_defines(sizes: ValueSizes, tiles: int) -> dict[str, int]:
    return {
        "DIM": sizes.dim,
        "INNER": sizes.inner_dim or 0,
        "SCALAR_BINS": sizes.scalar_bins,
        "PAIR_BINS": sizes.pair_bins,
        "SCALAR": sizes.scalar_token,
        "PAIR": sizes.pair_token,
        "PARTS": sizes.parts,
        "CLUSTER": _cluster(sizes, tiles),
        "INPUT_STAGES": skinny_gemm.INPUT_STAGES[tiles],
        "ROUNDS": skinny_gemm.held_rounds(sizes.dim, tiles),
        "TILES": tiles,
    }


def value_argmax_defines(sizes: ValueSizes) -> dict[str, int]:
    return {
        "SCALAR_BINS": sizes.scalar_bins,
        "SCALAR_DIVISOR": sizes.scalar_divisor,
        "PAIR_BINS": sizes.pair_bins,
        "SCALAR": sizes.scalar_token,
        "PAIR": sizes.pair_token,
        "END": sizes.end_token,
        "SCALAR_REACH": sizes.scalar_reach,
        "PAIR_REACH": sizes.pair_reach,
        "VOCAB": sizes.vocab,
    }
