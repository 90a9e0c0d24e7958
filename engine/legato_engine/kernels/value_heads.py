"""Values carried by tokens, by kernels; shape legend as in `cuda.value_heads`, V vocabulary."""

from __future__ import annotations

import dataclasses

import torch

from legato_engine.kernels.cuda.packed_layers import packed_head
from legato_engine.kernels.cuda.sampling import RowTensors, SampledTokens
from legato_engine.kernels.cuda.skinny_gemm import pack
from legato_engine.kernels.cuda.value_heads import (
    DecoderWeights,
    Embedder,
    MlpBins,
    NormedBins,
    TokenInputs,
    TwoLayerValues,
    ValueEncoder,
    ValueReader,
    ValueSizes,
)
from legato_engine.kernels.parameters import Affine, DenseMlp

__all__ = [
    "MlpDecoders",
    "NormedDecoders",
    "RowTensors",
    "SampledTokens",
    "TokenInputs",
    "TwoLayerValues",
    "ValueEncoder",
    "ValueHeads",
    "ValueSizes",
]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MlpDecoders:
    """A two-layer decoder for each kind of value."""

    scalar: DenseMlp
    pair: DenseMlp


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NormedDecoders:
    """A map of the normed hidden for each kind."""

    norm: Affine
    scalar: Affine
    pair: Affine


class ValueHeads:
    """Encoders and decoders of values, for up to `max_tokens` tokens at a time.

    Steps share memory and must not overlap.
    """

    def __init__(
        self,
        sizes: ValueSizes,
        scalar: ValueEncoder,
        pair: ValueEncoder,
        decoders: MlpDecoders | NormedDecoders,
        words_VD: torch.Tensor,
    ) -> None:
        self._words_VD = words_VD
        self._embedder = Embedder(sizes, scalar, pair)
        self._bins = _bins(sizes, decoders, words_VD.device)
        self._reader = ValueReader(sizes)
        self.max_tokens = self._bins.max_tokens
        self.two_layers: TwoLayerValues | None = None
        """Their weights, where decoders have two layers."""
        if isinstance(self._bins, MlpBins):
            both = (scalar, self._bins.scalar), (pair, self._bins.pair)
            self.two_layers = TwoLayerValues(sizes, *both)

    def embed(self, inputs: TokenInputs, x_BD: torch.Tensor) -> None:
        self._embedder.embed(inputs, self._words_VD, x_BD)

    def bins(
        self, token_B: torch.Tensor, hidden_BD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 logits; only bins that a token needs are up to date."""
        self._bins.fill(token_B, hidden_BD)
        batch = token_B.shape[0]
        return self._bins.scalar_bins_BN[:batch], self._bins.pair_bins_BS[:batch]

    def read(self, state: RowTensors, sampled: SampledTokens) -> None:
        """Write payloads, also to their rows, and certainties; 0 and 1 for plain tokens."""
        scalar_BN, pair_BS = self.bins(sampled.token_B, sampled.hidden_BD)
        self._reader.read(state, scalar_BN, pair_BS, sampled)


def _bins(
    sizes: ValueSizes, decoders: MlpDecoders | NormedDecoders, device: torch.device
) -> MlpBins | NormedBins:
    if isinstance(decoders, NormedDecoders):
        weights = packed_head([decoders.scalar, decoders.pair], decoders.norm)
        return NormedBins(sizes, weights, device)
    scalar, pair = (_packed(mlp, sizes.parts) for mlp in (decoders.scalar, decoders.pair))
    return MlpBins(sizes, scalar, pair, device)


def _packed(mlp: DenseMlp, parts: int) -> DecoderWeights:
    return DecoderWeights(
        fc1_weights=pack(mlp.fc1.weight),
        fc1_bias=mlp.fc1.bias,
        fc2_weights=pack(mlp.fc2.weight, parts),
        fc2_bias=mlp.fc2.bias,
    )
