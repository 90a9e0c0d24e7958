"""Weights of linear maps as a CPU's kernels want them; a row has the same bits in any batch.

Shape legend: T rows, I and O inputs and outputs of a map; G consecutive inputs share a scale.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
import torch.nn.functional as F

from legato_engine.kernels import reference
from legato_engine.kernels.cpu.decoder import PanelWeight
from legato_engine.kernels.cpu.library import Library

GROUP = 32  # inputs that share a scale and a zero in int4

_EXACT_ROWS = 8
"""Up to here each number of rows has a kernel of oneDNN; more rows are padded to whole blocks
of this many, which bounds the kernels that it makes."""

_LEAST_WEIGHTS = 1 << 16
"""Of a smaller map: it takes less time than oneDNN's preparations for a call, and little memory."""

_INT4_OUTPUTS = 16
"""The int4 kernels take multiples of this many outputs."""

_LEAST_SCALE = 1e-12


class PackedWeight(Protocol):
    """A weight [O, I] that replaces the tensor."""

    in_features: int
    out_features: int

    def multiply(self, rows_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        """[T, O] of contiguous rows, in their dtype."""


class FloatWeight:
    """Weight packed by oneDNN, in float32, or bfloat16 where the processor supports it."""

    def __init__(self, weight_OI: torch.Tensor) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _EXACT_ROWS)

    def multiply(self, rows_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        num_rows = rows_TI.shape[0]
        if num_rows > _EXACT_ROWS:
            rows_TI = reference.whole_blocks(rows_TI)
        attributes: tuple[str, list[float], str] = ("none", [], "")
        out_TO: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows_TI, self._packed, bias_O, *attributes
        )
        return out_TO[:num_rows]


class RowWeight:
    """Row by row: without instructions for bfloat16 several rows at once save nothing."""

    def __init__(self, weight_OI: torch.Tensor) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self._weight_OI = weight_OI

    def multiply(self, rows_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        out_TO = torch.cat(
            [F.linear(row_1I, self._weight_OI) for row_1I in torch.split(rows_TI, 1)]
        )
        return out_TO if bias_O is None else out_TO + bias_O


class Int8Weight:
    """Signed 8 bits and a scale for each output; products of inputs in bfloat16."""

    def __init__(self, weight_OI: torch.Tensor) -> None:
        self.out_features, self.in_features = weight_OI.shape
        largest_O = weight_OI.float().abs().amax(1).clamp_min(_LEAST_SCALE)
        self._scale_O = (largest_O / 127.0).bfloat16()  # rounded before the values are divided
        exact_OI = weight_OI.float() / self._scale_O.float()[:, None]
        self._values_OI = exact_OI.round().clamp(-127, 127).to(torch.int8).contiguous()

    def multiply(self, rows_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        product = torch.ops.aten._weight_int8pack_mm
        return _biased(product(rows_TI.bfloat16(), self._values_OI, self._scale_O), bias_O, rows_TI)


class Int4Weight:
    """4 bits, with a scale and a zero for each group of inputs, as GGUF's Q4_1."""

    def __init__(self, weight_OI: torch.Tensor) -> None:
        self.out_features, self.in_features = weight_OI.shape
        groups_OKG = torch.unflatten(weight_OI.float(), 1, (-1, GROUP))
        low_OK1 = groups_OKG.amin(2, keepdim=True)
        scale_OK1 = ((groups_OKG.amax(2, keepdim=True) - low_OK1) / 15.0).clamp_min(_LEAST_SCALE)
        scale_OK1 = scale_OK1.bfloat16().float()
        middle_OK1 = (low_OK1 + 8.0 * scale_OK1).bfloat16().float()
        values_OKG = ((groups_OKG - middle_OK1) / scale_OK1 + 8.0).round().clamp(0, 15)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            values_OKG.flatten(1).int(), 1
        )
        scales_OK2 = torch.cat([scale_OK1, middle_OK1], 2)
        self._scales_KO2 = scales_OK2.transpose(0, 1).bfloat16().contiguous()

    def multiply(self, rows_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
        out_TO = product(rows_TI.bfloat16(), self._packed, GROUP, self._scales_KO2)
        return _biased(out_TO, bias_O, rows_TI)


def pack(weight_OI: torch.Tensor, kind: str, library: Library | None = None) -> PackedWeight | None:
    """Pack a weight on the CPU as its `kind` says; None if it stays as it is.

    `auto` and `model` keep the values, `int8` and `int4` round them, but for small maps. With a
    `library` every weight is packed for it. Without one small maps stay, with int4 also those of
    sizes that its groups and kernels do not divide.
    """
    if library is not None:
        return panels(weight_OI, kind, library)
    outputs, inputs = weight_OI.shape
    if weight_OI.dtype == torch.bfloat16 and not _has_bfloat16() and kind in ("auto", "model"):
        return RowWeight(weight_OI)
    if weight_OI.numel() < _LEAST_WEIGHTS:
        return None
    if kind == "int8":
        return Int8Weight(weight_OI)
    if kind == "int4":
        divides = inputs % GROUP == 0 and outputs % _INT4_OUTPUTS == 0
        return Int4Weight(weight_OI) if divides else None
    rounds_alike = _rounds_alike(outputs, inputs, weight_OI.dtype)
    return FloatWeight(weight_OI) if rounds_alike else None


def panels(weight_OI: torch.Tensor, kind: str, library: Library) -> PanelWeight:
    rounded = kind in ("int8", "int4") and weight_OI.numel() >= _LEAST_WEIGHTS
    if not rounded:
        kind = "bfloat16" if weight_OI.dtype is torch.bfloat16 else "float32"
    return PanelWeight(library, weight_OI, kind)


def head_kind(kind: str) -> str:
    """Return the kind of a model's head: int4 costs it more accuracy than all layers together."""
    return "int8" if kind == "int4" else kind


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Map [..., in] to [..., out]; missing inputs of x count as zeros."""
    if (missing := weight.in_features - x.shape[-1]) > 0:
        x = F.pad(x, (0, missing))
    if x.dim() == 2 and x.is_contiguous():
        return weight.multiply(x, bias)
    out_TO = weight.multiply(x.reshape(-1, x.shape[-1]).contiguous(), bias)
    return out_TO.reshape(*x.shape[:-1], weight.out_features)


def _biased(
    product_TO: torch.Tensor, bias_O: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor:
    out_TO = product_TO.to(like.dtype)
    return out_TO if bias_O is None else out_TO + bias_O


def _has_bfloat16() -> bool:
    """Return whether oneDNN multiplies bfloat16 on this processor."""
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return supported


@functools.cache
def _rounds_alike(outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    """Try whether this processor's kernels round a row alike in any batch: nothing promises it."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch gives it no types
        return False
    generator = torch.Generator().manual_seed(0)
    x_TI = torch.randn(3 * _EXACT_ROWS, inputs, generator=generator).to(dtype)
    weight = FloatWeight(torch.randn(outputs, inputs, generator=generator).to(dtype))
    whole_TO = weight.multiply(x_TI, None)
    counts = (*range(1, _EXACT_ROWS + 1), 2 * _EXACT_ROWS)
    return all(
        torch.equal(weight.multiply(x_TI[first : first + count].contiguous(), None), expected_TO)
        for count in counts
        for first in (0, 3)
        if (expected_TO := whole_TO[first : first + count]).numel()
    )
