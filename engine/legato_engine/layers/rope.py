"""Rotary position embedding of the first dimensions of a head.

Shape legend: T tokens, R rotated dims, P positions.
"""

from __future__ import annotations

import torch
from torch import nn


class Rope(nn.Module):
    """Pairs (i, i + R/2) of the first R dims turn by position * theta^(-2i/R); the rest stays.

    Tables are float32 whatever the model's dtype, and no part of its checkpoint.
    """

    cos_PR: torch.Tensor
    sin_PR: torch.Tensor

    def __init__(self, theta: float, rotary_dim: int, max_positions: int) -> None:
        super().__init__()
        self._theta = theta
        self._rotary_dim = rotary_dim
        self._max_positions = max_positions
        empty = torch.empty(max_positions, rotary_dim // 2, dtype=torch.float32, device="meta")
        self.register_buffer("cos_PR", empty, persistent=False)
        self.register_buffer("sin_PR", empty, persistent=False)

    def fill(self, device: torch.device) -> None:
        """Compute the tables, once the weights are on their device."""
        exponent_R = torch.arange(0, self._rotary_dim, 2, dtype=torch.float32) / self._rotary_dim
        positions_P = torch.arange(self._max_positions, dtype=torch.float32)
        angle_PR = positions_P[:, None] / self._theta**exponent_R
        self.cos_PR = angle_PR.cos().to(device)
        self.sin_PR = angle_PR.sin().to(device)

    def at(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, 1, R/2] of int64 positions."""
        return self.cos_PR[positions_T][:, None], self.sin_PR[positions_T][:, None]
