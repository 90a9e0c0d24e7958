"""The two-layer MLP."""

from __future__ import annotations

import torch
from torch import nn

from legato_engine.kernels import activations, row_ops
from legato_engine.layers.linear import Linear, Sum
from legato_engine.layers.lora import MlpAdapters


class MLP(nn.Module):
    """`fc2(gelu(fc1(x)))` with biases and the tanh form of gelu."""

    def __init__(self, dim: int, inner_dim: int, out_dim: int) -> None:
        super().__init__()
        self.fc1 = Linear(dim, inner_dim)
        self.fc2 = Linear(inner_dim, out_dim)

    def forward(self, x: torch.Tensor, adapters: MlpAdapters | None = None) -> torch.Tensor:
        """With adapters, x is [T, dim]."""
        if adapters is None:
            out: torch.Tensor = self.fc2(self.fc1.gelu(x))
            return out
        hidden = activations.gelu(adapters.add_fc1(self.fc1(x), x))
        return adapters.add_fc2(self.fc2(hidden), hidden)

    def after_norm(self, x: torch.Tensor, y: torch.Tensor | None, ln: nn.LayerNorm) -> Sum:
        """The sum x + y may reuse the storage of x."""
        x, normed = row_ops.add_norm(x, y, ln)
        return self.fc2.onto(x, self.fc1.gelu(normed))
