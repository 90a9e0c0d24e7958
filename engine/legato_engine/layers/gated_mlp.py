"""The gated MLP."""

from __future__ import annotations

import torch
from torch import nn

from legato_engine.kernels import ops
from legato_engine.layers.linear import Linear, PackedLinear


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, without biases."""

    def __init__(self, dim: int, inner_dim: int) -> None:
        super().__init__()
        parts = {"gate_proj": inner_dim, "up_proj": inner_dim}
        self.gate_up = PackedLinear(dim, parts, bias=False)
        self.down_proj = Linear(inner_dim, dim, bias=False)

    def onto(self, to: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add the MLP of x to `to`, whose storage may be reused."""
        total, rest = self.down_proj.onto(to, ops.gate(self.gate_up(x)))
        return total if rest is None else total + rest
