"""Encoders and decoders of values with random weights, and what they do in plain torch.

Shape legend: B rows, D width, F frequencies, N bins of a decoder.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from legato_engine.kernels.cuda.skinny_gemm import pack
from legato_engine.kernels.cuda.value_heads import (
    DecoderWeights,
    TwoLayerValues,
    ValueEncoder,
    ValueSizes,
)
from legato_engine.kernels.megakernel.sizes import ModelSizes
from legato_engine.kernels.parameters import Affine

from benchmarks.megakernel.model import DEVICE, DTYPE, Linear

END, SCALAR, PAIR = 0, 5, 6
"""Token ids."""
_BINS = 1024  # of a value
_REACH = (32, 51)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Of `values` values, as bins of a decoder; frequencies [values, F]."""

    token: int
    frequencies: torch.Tensor
    encoder: Linear
    fc1: Linear
    fc2: Linear

    @classmethod
    def random(
        cls, token: int, values: int, dim: int, inner_dim: int, device: torch.device
    ) -> Kind:
        frequencies = torch.randn(values, 128 * values, device=device, dtype=DTYPE)
        return cls(
            token,
            frequencies,
            Linear.random(dim, 256 * values, 1.4, device),
            Linear.random(inner_dim, dim, device=device),
            Linear.random(_BINS * values, inner_dim, 4.0, device),
        )

    def embed(self, payload_B2: torch.Tensor) -> torch.Tensor:
        """[B, D] float32, rounded to bf16."""
        count = len(self.frequencies)
        angle_BC = (2 * math.pi * payload_B2[:, :count].to(DTYPE).float()).to(DTYPE).float()
        phase_BF = (angle_BC @ self.frequencies.float()).to(DTYPE).float()
        features_B2F = torch.cat([phase_BF.cos(), phase_BF.sin()], dim=1).to(DTYPE)
        return self.encoder(features_B2F).to(DTYPE).float()

    def bins(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """[B, N] float32, with inner activations rounded to bf16."""
        inner_BI = F.gelu(self.fc1(hidden_BD), approximate="tanh").to(DTYPE)
        return self.fc2(inner_BI)

    def packed(self, parts: int) -> tuple[ValueEncoder, DecoderWeights]:
        return (
            ValueEncoder(self.frequencies, Affine(self.encoder.weight, self.encoder.bias)),
            DecoderWeights(
                pack(self.fc1.weight), self.fc1.bias, pack(self.fc2.weight, parts), self.fc2.bias
            ),
        )


@dataclasses.dataclass(frozen=True)
class RandomValues:
    """Both kinds."""

    sizes: ValueSizes
    scalar: Kind
    pair: Kind

    @classmethod
    def random(
        cls, model: ModelSizes, device: torch.device = DEVICE, inner_dim: int = 0
    ) -> RandomValues:
        """`inner_dim`: by default four times the model's width, as Moondream 2's."""
        inner_dim = inner_dim or 4 * model.dim
        sizes = ValueSizes(
            dim=model.dim,
            inner_dim=inner_dim,
            scalar_features=128,
            pair_features=256,
            scalar_bins=_BINS,
            pair_bins=2 * _BINS,
            scalar_divisor=_BINS,
            scalar_token=SCALAR,
            pair_token=PAIR,
            end_token=END,
            scalar_reach=_REACH[0],
            pair_reach=_REACH[1],
            vocab=model.vocab_size,
        )
        kinds = (
            Kind.random(token, values, model.dim, inner_dim, device)
            for token, values in ((SCALAR, 1), (PAIR, 2))
        )
        return cls(sizes, *kinds)

    def two_layers(self) -> TwoLayerValues:
        parts = self.sizes.parts
        return TwoLayerValues(self.sizes, self.scalar.packed(parts), self.pair.packed(parts))

    def embed(
        self, words_VD: torch.Tensor, token_B: torch.Tensor, payload_B2: torch.Tensor
    ) -> torch.Tensor:
        """[B, D] float32."""
        x_BD = words_VD[token_B.long()].float()
        for kind in (self.scalar, self.pair):
            x_BD = torch.where((token_B == kind.token)[:, None], kind.embed(payload_B2), x_BD)
        return x_BD
