"""Matrix products by cublasLt, with what torch's own calls leave out.

A product may be added to a matrix before it is rounded, and its results may lie among other
columns. The library is the one that torch has loaded; which of its kernels runs depends on the
shape alone.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

import torch

from legato_engine.errors import InternalError

_ALIGNMENT = 256  # bytes; what the library's heuristic takes for granted
_STEP = 16  # bytes; from row to row
_HOPPER = (9, 0)
_LEAST_ROWS = 128  # below, a product is a reading of its weights
_WORKSPACE = 32 << 20  # bytes that a kernel may ask for at most

# Names and numbers of cublasLt.h.
_COMPUTE_32F, _R_32F, _R_16BF = 68, 0, 14
_OP_T = 1
_DESC_TRANSA, _DESC_EPILOGUE, _DESC_BIAS_POINTER, _DESC_BIAS_TYPE = 3, 7, 8, 26
_PREF_WORKSPACE = 1
_EPILOGUE_BIAS = 4


def can_multiply(*operands: torch.Tensor) -> bool:
    """Whether `multiply` takes x, weight and the rest: many rows on a Hopper, and the library.

    All but the weight and the bias may have several leading dimensions that can be flattened.
    """
    x, weight_OI = operands[:2]
    return (
        x.device.type == "cuda"
        and x.numel() >= _LEAST_ROWS * weight_OI.shape[1]
        and all(_is_plain(each) for each in operands)
        and _is_hopper(x.device)
        and _library() is not None
    )


def multiply(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor,
    out_TO: torch.Tensor,
    *,
    add_TO: torch.Tensor | None = None,
) -> None:
    """The product x W^T plus the bias, plus `add_TO` if there is one, rounded once, to `out_TO`.

    Rows are contiguous and may be any distance apart; `out_TO` may be `add_TO`. Asynchronous, and
    can be captured.
    """
    assert out_TO.shape == (len(x_TI), len(weight_OI)), "a row for each row"
    added = out_TO if add_TO is None else add_TO
    assert all(map(_is_plain, (added, out_TO))), "rows that can be read and written"
    shape = _Shape(
        rows=len(x_TI),
        inputs=x_TI.shape[1],
        outputs=len(weight_OI),
        strides=(weight_OI.stride(0), x_TI.stride(0), added.stride(0), out_TO.stride(0)),
        adds=add_TO is not None,
    )
    _plan(shape, x_TI.device).run((weight_OI, x_TI, added, out_TO), bias_O)


def _is_plain(x: torch.Tensor) -> bool:
    """Rows without gaps in themselves, beginning where the library's kernels load and store."""
    step = x.stride(-2) * x.element_size() if x.dim() > 1 else 0
    return (
        x.dtype is torch.bfloat16
        and x.stride(-1) == 1
        and step % _STEP == 0
        and x.data_ptr() % _ALIGNMENT == 0
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Shape:
    """What the choice of a kernel depends on; `strides` of weight, x, addend and result."""

    rows: int
    inputs: int
    outputs: int
    strides: tuple[int, int, int, int]
    adds: bool


class _Choice(ctypes.Structure):
    """The library's cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class _Plan:
    """One shape on one device. The library counts in columns: its A is the weight, its B is x."""

    def __init__(self, shape: _Shape, device: torch.device) -> None:
        library = _library()
        assert library is not None, "asked for before it was known to be there"
        self._library = library
        self._device = device
        self._shape = shape
        lengths = (shape.inputs, shape.inputs, shape.outputs, shape.outputs)
        counts = (shape.outputs, shape.rows, shape.rows, shape.rows)
        with torch.cuda.device(device):
            self._handle = _handle(device)
            self._layouts = [
                _made(library.cublasLtMatrixLayoutCreate, _R_16BF, *map(ctypes.c_int64, layout))
                for layout in zip(lengths, counts, shape.strides, strict=True)
            ]
            self._choice = self._choose()

    def run(self, matrices: tuple[torch.Tensor, ...], bias_O: torch.Tensor) -> None:
        """Enqueue on torch's current stream; A, B, C and D."""
        device = self._device
        workspace = torch.empty(self._choice.workspace, dtype=torch.uint8, device=device)
        one, add = ctypes.c_float(1.0), ctypes.c_float(float(self._shape.adds))
        a, b, c, d = (ctypes.c_void_p(matrix.data_ptr()) for matrix in matrices)
        layouts = self._layouts
        description = self._describe(bias_O.data_ptr())
        status = self._library.cublasLtMatmul(
            self._handle,
            description,
            *(ctypes.byref(one), a, layouts[0], b, layouts[1]),
            *(ctypes.byref(add), c, layouts[2], d, layouts[3]),
            ctypes.byref(self._choice.algorithm),
            ctypes.c_void_p(workspace.data_ptr()),
            ctypes.c_size_t(self._choice.workspace),
            ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream),
        )
        _check(self._library.cublasLtMatmulDescDestroy(description))
        _check(status)

    def _choose(self) -> _Choice:
        library, choice, count = self._library, _Choice(), ctypes.c_int()
        preference = _made(library.cublasLtMatmulPreferenceCreate)
        limit = ctypes.c_uint64(_WORKSPACE)
        _set(library.cublasLtMatmulPreferenceSetAttribute, preference, _PREF_WORKSPACE, limit)
        description = self._describe(_ALIGNMENT)
        status = library.cublasLtMatmulAlgoGetHeuristic(
            self._handle,
            description,
            *self._layouts,
            preference,
            1,
            ctypes.byref(choice),
            ctypes.byref(count),
        )
        _check(library.cublasLtMatmulDescDestroy(description))
        _check(library.cublasLtMatmulPreferenceDestroy(preference))
        _check(status)
        _check(choice.state)
        return choice

    def _describe(self, bias: int) -> ctypes.c_void_p:
        library = self._library
        description = _made(library.cublasLtMatmulDescCreate, _COMPUTE_32F, _R_32F)
        for attribute, value in (
            (_DESC_TRANSA, ctypes.c_int32(_OP_T)),
            (_DESC_EPILOGUE, ctypes.c_int32(_EPILOGUE_BIAS)),
            (_DESC_BIAS_TYPE, ctypes.c_int32(_R_16BF)),
            (_DESC_BIAS_POINTER, ctypes.c_void_p(bias)),
        ):
            _set(library.cublasLtMatmulDescSetAttribute, description, attribute, value)
        return description


@functools.cache
def _plan(shape: _Shape, device: torch.device) -> _Plan:
    return _Plan(shape, device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == _HOPPER


@functools.cache
def _library() -> Any:
    """What torch has loaded, None where it is not found under its name."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError:
        return None


@functools.cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    """One for each device, for the life of the process; the device is the current one."""
    torch.cuda.current_stream(device)  # the context exists from here on
    return _made(_library().cublasLtCreate)


def _made(create: Any, *arguments: Any) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    _check(create(ctypes.byref(made), *arguments))
    return made


def _set(function: Any, owner: ctypes.c_void_p, attribute: int, value: Any) -> None:
    size = ctypes.c_size_t(ctypes.sizeof(value))
    _check(function(owner, ctypes.c_int(attribute), ctypes.byref(value), size))


def _check(status: int) -> None:
    if status:
        raise InternalError(f"cublasLt: status {status}")
