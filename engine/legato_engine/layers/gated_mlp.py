"""The gated MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from legato_engine.layers.linear import Linear, PackedLinear


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, without biases."""

    def __init__(self, dim: int, inner_dim: int) -> None:
        super().__init__()
        parts = {"gate_proj": inner_dim, "up_proj": inner_dim}
        self.gate_up = PackedLinear(dim, parts, bias=False)
        self.down_proj = Linear(inner_dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: torch.Tensor = self.down_proj(F.silu(gate) * up)
        return out
