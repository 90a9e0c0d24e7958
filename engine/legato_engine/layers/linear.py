"""Linear layers, single and packed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from legato_engine.kernels import activations, ops, packed_weights
from legato_engine.kernels.cpu.decoder import PanelWeight, panel_kind
from legato_engine.kernels.cpu.library import Library
from legato_engine.kernels.map_codes import CodeFormat, MapCodes
from legato_engine.kernels.packed_weights import PackedWeight
from legato_engine.kernels.step import MapPart, StepMap

Sum = tuple[torch.Tensor, torch.Tensor | None]  # a tensor, or two terms still to be added

_FUSES_GELU = hasattr(torch, "_addmm_activation")  # not part of torch's stable interface


class Coded(nn.Module):
    """A layer whose weight [O, I] a checkpoint may have as codes, of the `stored` format."""

    stored: CodeFormat | None = None
    weight: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None

    def expect_codes(self, code_format: CodeFormat) -> None:
        """Have the tensors of a map's codes in place of the weight, before loading."""
        self.stored, self._dtype = code_format, self.weight.dtype
        self._shape = self.weight.shape
        tensors = code_format.empty(self._shape, self.weight.device).tensors()
        self.register_parameter("weight", None)
        for name in ("codes", "scales", "minima"):
            self.register_buffer(name, tensors.get(name))

    def take_codes(self) -> MapCodes:
        """Return the loaded codes, which leave an empty weight."""
        assert self.stored is not None, "the weight is no code"
        codes = MapCodes(self.stored.kind, self.codes, self.scales, self.minima)
        del self.codes, self.scales, self.minima
        empty = torch.empty(0, dtype=self._dtype, device=codes.codes.device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.stored = None
        return codes

    def use_codes(self, library: Library | None) -> PanelWeight | None:
        """Pack loaded codes for a CPU's library; without it, or panels for them, dequantise."""
        codes = self.take_codes()
        kind = panel_kind(codes)
        if library is not None and kind is not None:
            return PanelWeight(library, codes, kind)
        weight_OI = codes.dequantised().to(self.weight.dtype)
        self.weight = nn.Parameter(weight_OI, requires_grad=False)
        return None

    @property
    def num_coded(self) -> int:
        return self._shape.numel() if self.stored is not None else 0


class Embedding(Coded, nn.Embedding):
    """`nn.Embedding` of a weight or of codes that are dequantised or packed elsewhere."""


class Linear(Coded, nn.Linear):
    """`nn.Linear` through `ops.linear`; `counter` is set by `TileCounters`.

    A layer with a `packed` weight has no other: `weight` is empty.
    """

    __call__: Callable[..., torch.Tensor]
    counter: torch.Tensor | None = None
    packed: PackedWeight | None = None

    def pack(self, kind: str, library: Library | None) -> None:
        """Pack loaded codes or a weight on the CPU, as `packed_weights.pack` if that is faster."""
        if self.stored is not None and (panels := self.use_codes(library)) is not None:
            self.packed = panels
            return
        self.packed = packed_weights.pack(self.weight, kind, library)
        if self.packed is not None:
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def take(self, packed: PackedWeight, bias_O: torch.Tensor | None) -> None:
        """Replace the loaded weight, if there is one, and the bias, of any dtype."""
        self.packed = packed
        like = self.weight if bias_O is None else bias_O
        self.weight = nn.Parameter(like.new_empty(0), requires_grad=False)
        if bias_O is not None:
            self.bias = nn.Parameter(bias_O.detach(), requires_grad=False)

    @property
    def panels(self) -> PanelWeight:
        """The packed weight of a layer that was packed for a library."""
        assert isinstance(self.packed, PanelWeight), "packed without a library"
        return self.packed

    def dense(self) -> torch.Tensor:
        """Return the weight [O, I], in bf16 if it is packed for a GPU."""
        if self.packed is None:
            return self.weight
        assert isinstance(self.packed, MapPart), "packed for a CPU"
        return self.packed.dense()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return packed_weights.linear(input, self.packed, self.bias)
        counted = ops.linear_counted(input, self.weight, self.bias, self.counter)
        return ops.linear(input, self.weight, self.bias) if counted is None else counted

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """Apply a layer with a bias and gelu (tanh form); fused kernels do not round in between."""
        if self.packed is None:
            counted = ops.linear_counted(x, self.weight, self.bias, self.counter, gelu=True)
            if counted is not None:
                return counted
        # Torch's fused gelu is the tanh form on CUDA only.
        fuses_gelu = _FUSES_GELU and x.device.type == "cuda" and x.dtype == torch.bfloat16
        if self.packed is not None or not fuses_gelu:
            return activations.gelu(self(x))
        rows = x.reshape(-1, self.in_features)
        out = torch._addmm_activation(self.bias, rows, self.weight.t(), use_gelu=True)
        return out.view(*x.shape[:-1], self.out_features)

    def widen(self, multiple: int) -> None:
        """Pad the loaded weight to a multiple of inputs; narrower inputs stay valid."""
        if padding := -self.in_features % multiple:
            self.weight = nn.Parameter(F.pad(self.weight, (0, padding)), requires_grad=False)
            self.in_features += padding

    def onto(self, to: torch.Tensor, x: torch.Tensor) -> Sum:
        """Add this layer of x to `to`, rounded once if the product can add it.

        The sum reuses the storage of `to`, which is not to be read again.
        """
        weight_OI = self.weight if self.packed is None else None
        if isinstance(self.packed, StepMap):
            if (total := self.packed.onto(to, x, self.bias)) is not None:
                return total, None
            weight_OI = self.packed.dense_OI
        if weight_OI is None:
            return to, self(x)
        return ops.linear_onto(to, x, weight_OI, self.bias)


class TileCounters:
    """Tile counters of several layers' products, cleared together."""

    def __init__(self, layers: Sequence[Linear], device: torch.device) -> None:
        self._layers = layers
        self._counters = ops.tile_counters(len(layers), device)

    @contextlib.contextmanager
    def cleared(self) -> Iterator[None]:
        """Clear the counters; each layer runs at most once until the exit."""
        self._counters.zero_()
        for layer, counter in zip(self._layers, self._counters, strict=True):
            layer.counter = counter
        try:
            yield
        finally:
            for layer in self._layers:
                layer.counter = None


class PackedLinear(Linear):
    """Layers over one input that run as one and are separate in checkpoints.

    `parts`: numbers of outputs by name, in the order of `weight`'s rows; `gates`: silu of the first
    of two is to multiply the second.
    """

    def __init__(
        self, dim: int, parts: Mapping[str, int], *, bias: bool, gates: bool = False
    ) -> None:
        super().__init__(dim, sum(parts.values()), bias=bias)
        self.parts, self.gates = dict(parts), gates

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        """Apply a layer of two parts, and silu of the first times the second."""
        if isinstance(self.packed, StepMap) and (gated := self.packed.gate(x)) is not None:
            return gated
        return ops.gate(self(x))


def pack_linears(network: nn.Module, kind: str, library: Library | None) -> None:
    """Pack all linear layers of a network on the CPU that are not packed."""
    for module in network.modules():
        if isinstance(module, Linear) and module.packed is None:
            module.pack(kind, library)
