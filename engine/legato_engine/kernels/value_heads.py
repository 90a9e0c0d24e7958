"""Values carried by tokens, by kernels; shape legend as in `cuda.value_heads`, V vocabulary."""

from __future__ import annotations

import torch

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
from legato_engine.kernels.parameters import DenseMlp

__all__ = [
    "MlpBins",
    "NormedBins",
    "RowTensors",
    "SampledTokens",
    "TokenInputs",
    "TwoLayerValues",
    "ValueEncoder",
    "ValueHeads",
    "ValueSizes",
    "packed_decoder",
]


class ValueHeads:
    """Encoders and decoders of values, for up to `max_tokens` tokens at a time.

    Steps share memory and must not overlap.
    """

    def __init__(
        self,
        sizes: ValueSizes,
        scalar: ValueEncoder,
        pair: ValueEncoder,
        bins: MlpBins | NormedBins,
        words_VD: torch.Tensor,
    ) -> None:
        self._words_VD, self._bins = words_VD, bins
        self._embedder = Embedder(sizes, scalar, pair)
        self._reader = ValueReader(sizes)
        self.max_tokens = bins.max_tokens
        self.two_layers: TwoLayerValues | None = None
        """Their weights, where decoders have two layers."""
        if isinstance(bins, MlpBins):
            both = (scalar, bins.scalar), (pair, bins.pair)
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


def packed_decoder(mlp: DenseMlp, parts: int) -> DecoderWeights:
    """Pack a decoder whose second map's inputs are cut into `parts`."""
    return DecoderWeights(
        fc1_weights=pack(mlp.fc1.weight),
        fc1_bias=mlp.fc1.bias,
        fc2_weights=pack(mlp.fc2.weight, parts),
        fc2_bias=mlp.fc2.bias,
    )
