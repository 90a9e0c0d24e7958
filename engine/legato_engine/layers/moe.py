"""A mixture of experts in place of an MLP.

Shape legend: T tokens, D width, X experts, I inputs and O outputs of an expert's layer.
"""

from __future__ import annotations

import torch
from torch import nn

from legato_engine.kernels import ops
from legato_engine.kernels.experts import ExpertWeights
from legato_engine.kernels.low_rank import ExpertAdapters
from legato_engine.layers.linear import Linear


class ExpertLinear(nn.Module):
    """One bias-free layer of every expert: `weight` [X, O, I]."""

    scale: torch.Tensor | None

    def __init__(self, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.register_buffer("scale", None)

    def use_fp8(self) -> None:
        """Replace the weights by e4m3 with a float32 `scale` [X, O], to be loaded."""
        empty = torch.empty_like(self.weight, dtype=torch.float8_e4m3fn)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.scale = torch.empty(empty.shape[:2], dtype=torch.float32, device=empty.device)

    def weights(self) -> ExpertWeights:
        return ExpertWeights(self.weight, self.scale)


class MoE(nn.Module):
    """Routes each token through `num_active` experts.

    `fc1` makes both halves of the gated unit; only the router has biases.
    """

    def __init__(self, dim: int, inner_dim: int, num_experts: int, num_active: int) -> None:
        super().__init__()
        self._num_active = num_active
        self.router = Linear(dim, num_experts)
        self.fc1 = ExpertLinear(num_experts, dim, 2 * inner_dim)
        self.fc2 = ExpertLinear(num_experts, inner_dim, dim)

    def forward(
        self, x_TD: torch.Tensor, adapters: ExpertAdapters | None = None, *, capturable: bool
    ) -> torch.Tensor:
        """A `capturable` call reads nothing on the host, except on a CPU."""
        routes = ops.route(self.router(x_TD), self._num_active)
        up, down = self.fc1.weights(), self.fc2.weights()
        return ops.experts(x_TD, routes, up, down, capturable=capturable, adapters=adapters)

    def use_fp8(self) -> None:
        self.fc1.use_fp8()
        self.fc2.use_fp8()
