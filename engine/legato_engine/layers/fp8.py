"""Linear layers in e4m3: weights with a scale per output, activations with a scale per row.

An e4m3 value is off by some 2.6 %, and so is what many rows have in common. So a calibrated centre
is taken from a layer's inputs before they are rounded, and its product added to the bias. Where
inputs are outputs of a norm or of attention, a bias before them is lowered, which takes no time.

A GPU quantises activations with the preceding norm or gelu and never synchronises, so all can be
captured; the CPU multiplies the same numbers in float32.

Shape legend: T rows, D width, H heads, E head dim, K inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from legato_engine.errors import InvalidField
from legato_engine.kernels import ops, reference
from legato_engine.kernels.parameters import Quantised
from legato_engine.layers.attention import Attention, Heads, split_heads
from legato_engine.layers.linear import Linear, Sum
from legato_engine.layers.mlp import MLP

MULTIPLE = 16  # of inputs and outputs of a layer


class Centres(NamedTuple):
    """Mean inputs of a block's layers, float32 [K]; zeros change nothing."""

    qkv: torch.Tensor
    proj: torch.Tensor
    fc1: torch.Tensor
    fc2: torch.Tensor

    @classmethod
    def zeros(cls, dim: int, ff_dim: int, device: torch.device) -> Centres:
        zeros_D, zeros_F = (torch.zeros(size, device=device) for size in (dim, ff_dim))
        return cls(zeros_D, zeros_D, zeros_D, zeros_F)


class Fp8Linear(nn.Module):
    """A loaded linear layer: `weight` e4m3 [O, K], `scale` float32 [1, O]."""

    def __init__(self, linear: Linear, centre_K: torch.Tensor | None = None) -> None:
        """Quantise on the layer's device; inputs come without the `centre_K`, float32.

        Raises:
            InvalidField: the device, a size or a dtype does not allow it.
        """
        super().__init__()
        weight_OK = linear.dense()
        if problem := _problem(weight_OK):
            raise InvalidField(f"fp8: {problem}", field="vision_dtype")
        rows = reference.quantise(weight_OK)
        self.weight = _constant(rows.values)
        self.scale = _constant(rows.scale.t().contiguous())
        bias_O = linear.bias.float()
        if centre_K is not None:
            bias_O = bias_O + weight_OK.float() @ centre_K
        self.bias = _constant(bias_O.to(weight_OK.dtype))

    def multiply(self, x: Quantised) -> torch.Tensor:
        """[..., O] in the bias's dtype."""
        values, scale = x.values.flatten(0, -2), x.scale.flatten(0, -2)
        if values.device.type == "cpu":
            out = emulated(values, scale, self.weight, self.scale, self.bias)
        else:
            out = multiplied(values, scale, self.weight, self.scale, self.bias)
        return out.view(*x.values.shape[:-1], -1)


def multiplied(
    values_TK: torch.Tensor,
    scale_T1: torch.Tensor,
    weight_OK: torch.Tensor,
    scale_1O: torch.Tensor,
    bias_O: torch.Tensor,
) -> torch.Tensor:
    """[T, O] bfloat16, as is the bias."""
    return torch._scaled_mm(
        values_TK,
        weight_OK.t(),
        scale_a=scale_T1,
        scale_b=scale_1O,
        bias=bias_O,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def emulated(
    values_TK: torch.Tensor,
    scale_T1: torch.Tensor,
    weight_OK: torch.Tensor,
    scale_1O: torch.Tensor,
    bias_O: torch.Tensor,
) -> torch.Tensor:
    """Like `multiplied`, in float32, rounded to the bias's dtype."""
    x_TK = values_TK.float() * scale_T1
    w_OK = weight_OK.float() * scale_1O.t()
    return ops.linear(x_TK, w_OK, bias_O.float()).to(bias_O.dtype)


class Fp8Attention(nn.Module):
    """A loaded `Attention` in e4m3."""

    def __init__(self, attn: Attention, num_heads: int, ln: nn.LayerNorm, centres: Centres) -> None:
        """Lower the bias of the norm `ln` before it."""
        super().__init__()
        self._num_heads = num_heads
        self.qkv = Fp8Linear(attn.qkv, _lower(ln, centres.qkv))
        # values are the last outputs; a row's attention weights sum to 1
        self.proj = Fp8Linear(attn.proj, _lower(self.qkv, centres.proj))

    def after_norm(
        self, x: torch.Tensor, y: torch.Tensor | None, ln: nn.LayerNorm
    ) -> tuple[torch.Tensor, Heads]:
        x, normed = ops.add_norm_quantised(x, y, ln)
        return x, split_heads(self.qkv.multiply(normed), self._num_heads)

    def join(self, heads: torch.Tensor) -> torch.Tensor:
        return self.proj.multiply(ops.quantise(heads.flatten(-2)))

    def join_onto(self, x: torch.Tensor, heads: torch.Tensor) -> Sum:
        return x, self.join(heads)


class Fp8MLP(nn.Module):
    """A loaded `MLP` in e4m3."""

    __call__: Callable[..., torch.Tensor]

    def __init__(self, mlp: MLP, ln: nn.LayerNorm, centres: Centres) -> None:
        """Lower the bias of the norm `ln` before it."""
        super().__init__()
        self.fc1 = Fp8Linear(mlp.fc1, _lower(ln, centres.fc1))
        self.centre = _constant(centres.fc2.to(self.fc1.bias.dtype))
        self.fc2 = Fp8Linear(mlp.fc2, self.centre.float())

    def forward(self, normed: Quantised) -> torch.Tensor:
        return self.fc2.multiply(ops.quantise_gelu(self.fc1.multiply(normed), self.centre))

    def after_norm(self, x: torch.Tensor, y: torch.Tensor | None, ln: nn.LayerNorm) -> Sum:
        x, normed = ops.add_norm_quantised(x, y, ln)
        return x, self(normed)


def _lower(layer: nn.LayerNorm | Fp8Linear, centre_K: torch.Tensor) -> torch.Tensor:
    """Lower a layer's last outputs, and return by how much: its bias rounds."""
    before, count = layer.bias.float(), len(centre_K)
    lowered = torch.cat([before[:-count], before[-count:] - centre_K])
    layer.bias = _constant(lowered.to(layer.bias.dtype))
    return before[-count:] - layer.bias.float()[-count:]


def _problem(weight_OK: torch.Tensor) -> str | None:
    device, dtype = weight_OK.device, weight_OK.dtype
    if not ops.can_multiply_e4m3(device):
        return "this GPU has no e4m3 arithmetic"
    if device.type != "cpu" and dtype != torch.bfloat16:
        return f"results are bfloat16, but the weights are {dtype}"
    outputs, inputs = weight_OK.shape
    if inputs % MULTIPLE or outputs % MULTIPLE:
        return f"layer sizes must be multiples of {MULTIPLE}, not {inputs} to {outputs}"
    return None


def _constant(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)
