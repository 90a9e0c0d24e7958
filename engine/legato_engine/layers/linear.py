"""The linear layer, and several of one input as one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from legato_engine.kernels import ops

_FUSES_GELU = hasattr(torch, "_addmm_activation")  # not part of torch's stable interface


class Linear(nn.Linear):
    """`nn.Linear` by way of `ops.linear`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., out] of [..., in]."""
        return ops.linear(input, self.weight, self.bias)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """The gelu (tanh form) of this layer of [..., in]; not rounded before it where fused.

        The layer has a bias.
        """
        if not self._fuses_gelu(x):
            return F.gelu(self(x), approximate="tanh")
        rows = x.reshape(-1, self.in_features)
        out = torch._addmm_activation(self.bias, rows, self.weight.t(), use_gelu=True)
        return out.view(*x.shape[:-1], self.out_features)

    def _fuses_gelu(self, x: torch.Tensor) -> bool:
        """On CUDA only: elsewhere torch's fused gelu is not the tanh form."""
        return _FUSES_GELU and x.device.type == "cuda" and x.dtype == torch.bfloat16


class PackedLinear(Linear):
    """Layers over one input that run as one; checkpoints hold them apart.

    `parts` gives the outputs of each by its name, in the order of the rows of `weight`.
    """

    def __init__(self, dim: int, parts: Mapping[str, int], *, bias: bool) -> None:
        super().__init__(dim, sum(parts.values()), bias=bias)
        self.parts = dict(parts)
