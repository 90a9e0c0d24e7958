"""The linear layer, and several of one input as one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from legato_engine.kernels import ops

Sum = tuple[torch.Tensor, torch.Tensor | None]  # a tensor, or two of one shape that are to be added

_FUSES_GELU = hasattr(torch, "_addmm_activation")  # not part of torch's stable interface


class Linear(nn.Linear):
    """`nn.Linear` by way of `ops.linear`; `counter` belongs to `TileCounters`."""

    counter: torch.Tensor | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., out] of [..., in]."""
        counted = ops.linear_counted(input, self.weight, self.bias, self.counter)
        return ops.linear(input, self.weight, self.bias) if counted is None else counted

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """The gelu (tanh form) of this layer of [..., in]; not rounded before it where fused.

        The layer has a bias.
        """
        counted = ops.linear_counted(x, self.weight, self.bias, self.counter, gelu=True)
        if counted is not None:
            return counted
        if not self._fuses_gelu(x):
            return F.gelu(self(x), approximate="tanh")
        rows = x.reshape(-1, self.in_features)
        out = torch._addmm_activation(self.bias, rows, self.weight.t(), use_gelu=True)
        return out.view(*x.shape[:-1], self.out_features)

    def widen(self, multiple: int) -> None:
        """Take inputs of a multiple from now on, the last of which are nothing, once it is loaded.

        Narrower ones go on as before.
        """
        if padding := -self.in_features % multiple:
            self.weight = nn.Parameter(F.pad(self.weight, (0, padding)), requires_grad=False)
            self.in_features += padding

    def onto(self, to: torch.Tensor, x: torch.Tensor) -> Sum:
        """`to` plus this layer of x, in one term if the product adds it; `to` is not used any more.

        One term is stored where `to` was, and is rounded once.
        """
        return ops.linear_onto(to, x, self.weight, self.bias)

    def _fuses_gelu(self, x: torch.Tensor) -> bool:
        """On CUDA only: elsewhere torch's fused gelu is not the tanh form."""
        return _FUSES_GELU and x.device.type == "cuda" and x.dtype == torch.bfloat16


class TileCounters:
    """What products of some layers deal out their tiles by, cleared for all of them at once."""

    def __init__(self, layers: Sequence[Linear], device: torch.device) -> None:
        self._layers = layers
        self._counters = ops.tile_counters(len(layers), device)

    @contextlib.contextmanager
    def cleared(self) -> Iterator[None]:
        """Each of the layers runs at most once meanwhile, and nothing else uses these counters."""
        self._counters.zero_()
        for layer, counter in zip(self._layers, self._counters, strict=True):
            layer.counter = counter
        try:
            yield
        finally:
            for layer in self._layers:
                layer.counter = None


class PackedLinear(Linear):
    """Layers over one input that run as one; checkpoints hold them apart.

    `parts` gives the outputs of each by its name, in the order of the rows of `weight`.
    """

    def __init__(self, dim: int, parts: Mapping[str, int], *, bias: bool) -> None:
        super().__init__(dim, sum(parts.values()), bias=bias)
        self.parts = dict(parts)
