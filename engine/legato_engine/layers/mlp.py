"""The two-layer perceptron that every part of Moondream uses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from legato_engine.layers.linear import Linear


class MLP(nn.Module):
    """`fc2(gelu(fc1(x)))` with the tanh approximation of gelu and biases on both."""

    def __init__(self, dim: int, inner_dim: int, out_dim: int) -> None:
        super().__init__()
        self.fc1 = Linear(dim, inner_dim)
        self.fc2 = Linear(inner_dim, out_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., dim] to [..., out_dim]."""
        hidden: torch.Tensor = self.fc1(x)
        out: torch.Tensor = self.fc2(F.gelu(hidden, approximate="tanh"))
        return out
