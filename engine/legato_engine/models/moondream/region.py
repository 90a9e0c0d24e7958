"""Coordinates and sizes: encoded as embeddings, decoded as bins.

Shape legend: T tokens, D text width, F Fourier features.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from legato_engine.kernels.reference import concentration
from legato_engine.layers.linear import Linear
from legato_engine.layers.mlp import MLP
from legato_engine.models.moondream.config import RegionConfig

_SIZE_OCTAVES = 10
"""Size bins are logarithmic over 2^-10 .. 1."""


_NEAR_PLACE = 1 / 32
"""Coordinates this close in the image count as one place."""

_NEAR_OCTAVES = 0.5
"""Sizes whose ratio has at most this logarithm count as one size."""


def coord_reach(num_bins: int) -> int:
    """Bins to each side of one that mean nearly the same place."""
    return round(num_bins * _NEAR_PLACE)


def size_reach(num_bins: int) -> int:
    """Bins to each side of one that mean nearly the same size."""
    return round((num_bins - 1) * _NEAR_OCTAVES / _SIZE_OCTAVES)


class RegionCoder(nn.Module):
    """Encoders and decoders of float32 values."""

    def __init__(self, config: RegionConfig, text_dim: int) -> None:
        super().__init__()
        self._coord_bins = config.coord_bins
        self._coord_divisor = config.coord_divisor
        self._size_bins = config.size_bins
        self.coord_features = nn.Parameter(torch.empty(1, config.coord_features))
        self.size_features = nn.Parameter(torch.empty(2, config.size_features))
        self.coord_encoder = Linear(2 * config.coord_features, text_dim)
        self.size_encoder = Linear(2 * config.size_features, text_dim)
        self.ln = nn.LayerNorm(text_dim) if config.inner_dim is None else None
        self.coord_decoder = _decoder(text_dim, config.inner_dim, config.coord_bins)
        self.size_decoder = _decoder(text_dim, config.inner_dim, 2 * config.size_bins)

    def encode_coord(self, value_T1: torch.Tensor) -> torch.Tensor:
        """[T, D] of coordinates in 0..1."""
        return self.coord_encoder(_fourier(value_T1, self.coord_features))

    def encode_size(self, size_T2: torch.Tensor) -> torch.Tensor:
        return self.size_encoder(_fourier(size_T2, self.size_features))

    def decode_coord(self, hidden_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T] float32, and the concentration of each."""
        logits_TN = self._coord_logits(hidden_TD)
        bin_T = logits_TN.argmax(-1)
        near_T = concentration(logits_TN, bin_T, coord_reach(self._coord_bins))
        return bin_T.float() / self._coord_divisor, near_T

    def decode_size(self, hidden_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, 2] float32 in 2^-10 .. 1; [T] the concentration of both values together."""
        logits_T2N = self._size_logits(hidden_TD)
        bin_T2 = logits_T2N.argmax(-1)
        near_T2 = concentration(logits_T2N, bin_T2, size_reach(self._size_bins))
        return sizes_of(bin_T2, self._size_bins), near_T2[:, 0] * near_T2[:, 1]

    def coord_logprobs(self, hidden_TD: torch.Tensor, value_T: torch.Tensor) -> torch.Tensor:
        bin_T = _bins(value_T * self._coord_divisor, self._coord_bins)
        return _logprobs(self._coord_logits(hidden_TD), bin_T)

    def size_logprobs(self, hidden_TD: torch.Tensor, size_T2: torch.Tensor) -> torch.Tensor:
        """[T] float32, both bins together."""
        octaves_T2 = size_T2.clamp(min=2.0**-_SIZE_OCTAVES).log2() + _SIZE_OCTAVES
        bin_T2 = _bins(octaves_T2 / _SIZE_OCTAVES * (self._size_bins - 1), self._size_bins)
        return _logprobs(self._size_logits(hidden_TD), bin_T2).sum(-1)

    def _coord_logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return self.coord_decoder(self._normed(hidden_TD))

    def _size_logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return self.size_decoder(self._normed(hidden_TD)).reshape(-1, 2, self._size_bins)

    def _normed(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return hidden_TD if self.ln is None else self.ln(hidden_TD)


def sizes_of(bin_T2: torch.Tensor, num_bins: int) -> torch.Tensor:
    """[T, 2] float32.

    The vectorised and the scalar exp2 of a CPU differ in the last bit, and a row's place in the
    batch decides which computes it; rounded from float64 they agree.
    """
    octaves_T2 = bin_T2.float() / (num_bins - 1) * _SIZE_OCTAVES - _SIZE_OCTAVES
    return torch.exp2(octaves_T2.double()).float()


def _decoder(text_dim: int, inner_dim: int | None, bins: int) -> MLP | Linear:
    return Linear(text_dim, bins) if inner_dim is None else MLP(text_dim, inner_dim, bins)


def _bins(scaled: torch.Tensor, num_bins: int) -> torch.Tensor:
    """Rows without a value get any bin."""
    return scaled.round().clamp(0, num_bins - 1).long()


def _logprobs(logits_N: torch.Tensor, bin_: torch.Tensor) -> torch.Tensor:
    return logits_N.float().log_softmax(-1).gather(-1, bin_[..., None])[..., 0]


def _fourier(values_TN: torch.Tensor, features_NF: torch.Tensor) -> torch.Tensor:
    """[T, 2F]; angle and phase are rounded to the model's dtype, as in training."""
    angle_TN = 2 * math.pi * values_TN.to(features_NF.dtype)
    phase_TF = (angle_TN[:, :, None].float() * features_NF.float()).sum(1).to(features_NF.dtype)
    return torch.cat([phase_TF.cos(), phase_TF.sin()], dim=-1)
