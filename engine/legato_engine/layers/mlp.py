"""MLP layers: two-layer, gated, mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from legato_engine.kernels import activations, ops
from legato_engine.kernels.map_codes import CodeFormat, MapCodes, WeightKind, map_codes
from legato_engine.kernels.parameters import Affine, ExpertAdapters, ExpertWeights, PackedExperts
from legato_engine.kernels.step import packed_experts
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
    """One bias-free layer of every expert: `weight` [X, O, I].

    Codes have a `scale`, float32 [X, O], those of int4 bf16 [X, O, G]. `gates`: the outputs are two
    halves, whose rows are to be read side by side.
    """

    scale: torch.Tensor | None

    def __init__(
        self, num_experts: int, in_features: int, out_features: int, *, gates: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.register_buffer("scale", None)
        self.kind, self._gates = WeightKind.BF16, gates
        self._packed: PackedExperts | None = None

    def use_codes(self, code_format: CodeFormat) -> None:
        """Replace the weights by codes, to be loaded."""
        experts, outputs, inputs = self.weight.shape
        empty = code_format.empty((experts * outputs, inputs), self.weight.device)
        assert empty.scales is not None, "only bf16 has no scales"
        self.kind = code_format.kind
        codes_XOI = torch.unflatten(empty.codes, 0, (experts, outputs))
        self.weight = nn.Parameter(codes_XOI, requires_grad=False)
        self.scale = torch.unflatten(empty.scales, 0, (experts, outputs))

    def quantise(self, code_format: CodeFormat) -> None:
        """Round the loaded weights, one expert at a time."""
        weight_XOI = self.weight.detach()
        self.use_codes(code_format)
        for weight_OI, codes in zip(weight_XOI, self._codes(), strict=True):
            for to, made in zip(
                codes.tensors().values(),
                map_codes(weight_OI, code_format).tensors().values(),
                strict=True,
            ):
                to.copy_(made)

    def pack(self) -> None:
        """Pack codes of int4 for a GPU; those of 8 bits are read where they are."""
        if self.kind is WeightKind.INT4:
            self._packed = packed_experts(self._codes(), gates=self._gates)
            empty_XOI = self.weight.new_empty(*self.weight.shape[:2], 0)
            self.weight, self.scale = nn.Parameter(empty_XOI, requires_grad=False), None

    def dequantise(self, dtype: torch.dtype) -> None:
        """Turn codes of int4 into weights for a CPU, which reads those of 8 bits as they are."""
        if self.kind is WeightKind.INT4:
            weight_XOI = torch.stack([each.dequantised().to(dtype) for each in self._codes()])
            self.weight, self.scale = nn.Parameter(weight_XOI, requires_grad=False), None
            self.kind = WeightKind.BF16

    def weights(self) -> ExpertWeights:
        return ExpertWeights(self.weight, self.scale, self._packed)

    def _codes(self) -> list[MapCodes]:
        """Return views of each expert's codes."""
        assert self.scale is not None, "codes have scales"
        each = zip(self.weight.detach(), self.scale, strict=True)
        return [MapCodes(self.kind, codes_OI, scales) for codes_OI, scales in each]


class MoE(nn.Module):
    """Routes each token through `num_active` experts.

    `fc1` makes both halves of the gated unit; only the router has biases. `ln`: the norm of the
    inputs, where the maps beside the experts have it folded in.
    """

    def __init__(self, dim: int, inner_dim: int, num_experts: int, num_active: int) -> None:
        super().__init__()
        self._num_active = num_active
        self.router = Linear(dim, num_experts)
        self.fc1 = ExpertLinear(num_experts, dim, 2 * inner_dim, gates=True)
        self.fc2 = ExpertLinear(num_experts, inner_dim, dim)
        self.ln: nn.LayerNorm | None = None

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

    @property
    def kind(self) -> WeightKind:
        """The kind of the experts' weights."""
        return self.fc1.kind

    @property
    def layers(self) -> tuple[ExpertLinear, ExpertLinear]:
        return self.fc1, self.fc2
