"""Rotary position embedding.

Shape legend: T tokens, R rotated dims, P positions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import nn

Scaling = Callable[[torch.Tensor], torch.Tensor]
"""Maps positions per radian of each pair [R/2] to those for a longer context."""


@dataclasses.dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every pair rotates `factor` times slower."""

    factor: float

    def __call__(self, divisor_R: torch.Tensor) -> torch.Tensor:
        return divisor_R * self.factor


@dataclasses.dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Slows pairs by their turns in `first_context` positions.

    Fewer than `low` turns: by `factor`; more than `high`: not at all; in between smoothly.
    """

    factor: float
    low: float
    high: float
    first_context: int

    def __call__(self, divisor_R: torch.Tensor) -> torch.Tensor:
        turns_R = self.first_context / (2 * math.pi * divisor_R)
        kept_R = ((turns_R - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        return divisor_R / ((1 - kept_R) / self.factor + kept_R)


@dataclasses.dataclass(frozen=True, slots=True)
class FactorScaling:
    """Each pair rotates slower by a factor of its own [R/2]."""

    factors: tuple[float, ...]

    def __call__(self, divisor_R: torch.Tensor) -> torch.Tensor:
        return divisor_R * torch.tensor(self.factors)


class Rope(nn.Module):
    """Rotates pairs (i, i + R/2) of the first R dims by position * theta^(-2i/R).

    The tables are float32 whatever the model's dtype, and not in its checkpoint.
    """

    cos_PR: torch.Tensor
    sin_PR: torch.Tensor

    def __init__(
        self, theta: float, rotary_dim: int, max_positions: int, scaling: Scaling | None = None
    ) -> None:
        super().__init__()
        self._scaling = scaling
        self._theta = theta
        self._rotary_dim = rotary_dim
        self._max_positions = max_positions
        empty = torch.empty(max_positions, rotary_dim // 2, dtype=torch.float32, device="meta")
        self.register_buffer("cos_PR", empty, persistent=False)
        self.register_buffer("sin_PR", empty, persistent=False)

    def fill(self, device: torch.device) -> None:
        exponent_R = torch.arange(0, self._rotary_dim, 2, dtype=torch.float32) / self._rotary_dim
        divisor_R = self._theta**exponent_R
        if self._scaling is not None:
            divisor_R = self._scaling(divisor_R)
        positions_P = torch.arange(self._max_positions, dtype=torch.float32)
        angle_PR = positions_P[:, None] / divisor_R
        self.cos_PR = angle_PR.cos().to(device)
        self.sin_PR = angle_PR.sin().to(device)

    def at(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, 1, R/2]."""
        return self.cos_PR[positions_T][:, None], self.sin_PR[positions_T][:, None]
