"""MLP layers: two-layer, gated, mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from legato_engine.kernels import activations, ops
from legato_engine.kernels.map_codes import WeightKind, format_of, map_codes
from legato_engine.kernels.parameters import Affine, ExpertAdapters, ExpertWeights
from legato_engine.layers.linear import Linear, PackedLinear, Sum
from legato_engine.layers.lora import LayerAdapters


class MLP(nn.Module):
    """`fc2(gelu(fc1(x)))` with biases and the tanh form of gelu."""

    __call__: Callable[..., torch.Tensor]

    def __init__(self, dim: int, inner_dim: int, out_dim: int) -> None:
        super().__init__()
        self.fc1 = Linear(dim, inner_dim)
        self.fc2 = Linear(inner_dim, out_dim)
        self.adapter_norm: Affine | None = None
        """What adapters' inputs still are to be multiplied by and added, if `fc1` has it."""

    def forward(self, x: torch.Tensor, adapters: LayerAdapters | None = None) -> torch.Tensor:
        """Apply the MLP; with adapters, x is [T, dim]."""
        if adapters is None:
            return self.fc2(self.fc1.gelu(x))
        own = x
        if self.adapter_norm is not None:
            own = x * self.adapter_norm.weight + self.adapter_norm.bias
        hidden = activations.gelu(adapters.add(self.fc1(x), own, "fc1"))
        return adapters.add(self.fc2(hidden), hidden, "fc2")

    def after_norm(self, x: torch.Tensor, y: torch.Tensor | None, ln: nn.LayerNorm) -> Sum:
        """Add x + y, which may reuse the storage of x, and apply the map to its norm."""
        x, normed = ops.add_norm(x, y, ln)
        return self.fc2.onto(x, self.fc1.gelu(normed))


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, without biases."""

    def __init__(self, dim: int, inner_dim: int) -> None:
        super().__init__()
        parts = {"gate_proj": inner_dim, "up_proj": inner_dim}
        self.gate_up = PackedLinear(dim, parts, bias=False, gates=True)
        self.down_proj = Linear(inner_dim, dim, bias=False)

    def onto(
        self, to: torch.Tensor, x: torch.Tensor, adapters: LayerAdapters | None = None
    ) -> torch.Tensor:
        """Add the MLP of x to `to`, whose storage may be reused; with adapters, x is [T, dim]."""
        if adapters is None:
            hidden = self.gate_up.gate(x)
        else:
            hidden = ops.gate(adapters.add(self.gate_up(x), x, *self.gate_up.parts))
        total, rest = self.down_proj.onto(to, hidden)
        out = total if rest is None else total + rest
        return out if adapters is None else adapters.add(out, hidden, "down_proj")


# Shape legend: T tokens, D width, X experts, I inputs and O outputs of an expert's layer.


class ExpertLinear(nn.Module):
    """One bias-free layer of every expert: `weight` [X, O, I]."""

    scale: torch.Tensor | None

    def __init__(self, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.register_buffer("scale", None)

    def use_codes(self, kind: WeightKind) -> None:
        """Replace the weights by codes with a float32 `scale` [X, O], to be loaded."""
        empty = torch.empty_like(self.weight, dtype=kind.code_dtype)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.scale = torch.empty(empty.shape[:2], dtype=torch.float32, device=empty.device)

    def quantise(self, kind: WeightKind) -> None:
        """Round the loaded weights, one expert at a time."""
        weight_XOI = self.weight.detach()
        self.use_codes(kind)
        assert self.scale is not None, "codes have scales"
        for weight_OI, codes_OI, scale_O in zip(weight_XOI, self.weight, self.scale, strict=True):
            codes = map_codes(weight_OI, format_of(kind))
            codes_OI.copy_(codes.codes)
            if codes.scales is not None:
                scale_O.copy_(codes.scales)

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
        """Apply the chosen experts; a `capturable` call reads nothing on the host but on a CPU."""
        routes = ops.route(self.router(x_TD), self._num_active)
        up, down = self.fc1.weights(), self.fc2.weights()
        return ops.experts(x_TD, routes, up, down, capturable=capturable, adapters=adapters)

    def runs_grouped(self, like_TD: torch.Tensor) -> bool:
        """Return whether many tokens like these are grouped products, which can be captured."""
        return ops.can_group(like_TD, self.fc1.weights(), self.fc2.weights())

    def use_codes(self, kind: WeightKind) -> None:
        self.fc1.use_codes(kind)
        self.fc2.use_codes(kind)

    def quantise(self, kind: WeightKind) -> None:
        self.fc1.quantise(kind)
        self.fc2.quantise(kind)
