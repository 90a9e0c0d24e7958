"""Weights of linear maps in the panels of the C++ kernels.

Shape legend: T rows, I and O inputs and outputs of a map.
"""

from __future__ import annotations

import ctypes

import torch

from legato_engine.kernels.cpu import library as native
from legato_engine.kernels.cpu.library import Library

KINDS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}
_ALIGNMENT = 64


class PanelWeight:
    """A `PackedWeight` of a kind of `KINDS`; a row's bits depend on that row only."""

    def __init__(self, library: Library, weight_OI: torch.Tensor, kind: str) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self.kind = kind
        self._library = library
        described = self.described(None)
        size = library.packed_bytes(ctypes.byref(described))
        memory = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
        self._data = memory[-memory.data_ptr() % _ALIGNMENT :][:size]
        weight_OI = weight_OI.detach().contiguous()
        if weight_OI.dtype is not torch.bfloat16:
            weight_OI = weight_OI.float()
        library.pack(
            library.pool(),
            ctypes.byref(described),
            weight_OI.data_ptr(),
            weight_OI.dtype is torch.bfloat16,
            self._data.data_ptr(),
        )

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def described(self, bias_O: torch.Tensor | None) -> native.Linear:
        """`bias_O` is float32 and outlives the result."""
        data = self._data.data_ptr() if hasattr(self, "_data") else None
        bias = None if bias_O is None else bias_O.data_ptr()
        return native.Linear(data, bias, KINDS[self.kind], self.in_features, self.out_features)

    def multiply(self, rows_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        dtype, rows_TI = rows_TI.dtype, rows_TI.float().contiguous()
        bias_O = None if bias_O is None else bias_O.float().contiguous()
        out_TO = torch.empty(len(rows_TI), self.out_features)
        self._library.multiply(
            self._library.pool(),
            ctypes.byref(self.described(bias_O)),
            rows_TI.data_ptr(),
            len(rows_TI),
            out_TO.data_ptr(),
        )
        return out_TO.to(dtype)

    def rows(self, outputs_T: torch.Tensor) -> torch.Tensor:
        """Weights of some outputs, float32 [T, I]."""
        outputs_T = outputs_T.contiguous()
        rows_TI = torch.empty(len(outputs_T), self.in_features)
        described = ctypes.byref(self.described(None))
        self._library.unpack(described, outputs_T.data_ptr(), len(outputs_T), rows_TI.data_ptr())
        return rows_TI
