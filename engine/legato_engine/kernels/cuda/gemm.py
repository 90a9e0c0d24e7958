"""Matrix products by cublasLt, with options that torch does not offer."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from legato_engine.errors import InternalError
from legato_engine.kernels.cuda.capability import Kernels, runs
from legato_engine.kernels.cuda.module import checked


@functools.cache
def recording_stream(device: torch.device) -> Any:
    """Create a stream outside of any capture, for `launch_cleared`.

    It is not one of torch's streams, which are reused and may be capturing by then.
    """
    from cuda.bindings import driver

    with torch.cuda.device(device):
        torch.cuda.current_stream(device)  # the context exists from here on
        return checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))


def launch_cleared(stream: Any, enqueue: Callable[[int], None], cleared: torch.Tensor) -> bool:
    """Enqueue on torch's current stream the one kernel that `enqueue` submits to a `stream`.

    `enqueue` also zeroes bytes of `cleared`; that is left out, so the caller must have zeroed
    them. Return False, with nothing launched, if it does anything else, or does not clear. The
    kernel begins after the preceding one has ended, because a library's kernel need not wait by
    itself. Can be captured.
    """
    with _recorded(stream, enqueue) as graph:
        kernels, others = _nodes(graph)
        clears = [node for node in others if _only_clears(node, cleared)]
        if len(kernels) != 1 or not clears or clears != others:
            return False
        return _launch(kernels[0])


@contextlib.contextmanager
def _recorded(stream: Any, enqueue: Callable[[int], None]) -> Iterator[Any]:
    """Capture `enqueue` in a graph that never runs, independent of any current capture."""
    from cuda.bindings import driver

    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    checked(driver.cuStreamBeginCapture(stream, mode))
    try:
        enqueue(int(stream))
    finally:
        graph = checked(driver.cuStreamEndCapture(stream))
    try:
        yield graph
    finally:
        checked(driver.cuGraphDestroy(graph))


def _nodes(graph: Any) -> tuple[list[Any], list[Any]]:
    from cuda.bindings import driver

    _, count = checked(driver.cuGraphGetNodes(graph))
    nodes, _ = checked(driver.cuGraphGetNodes(graph, count))
    kind = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    kernels = [node for node in nodes if checked(driver.cuGraphNodeGetType(node)) == kind]
    return kernels, [node for node in nodes if node not in kernels]


def _only_clears(node: Any, memory: torch.Tensor) -> bool:
    from cuda.bindings import driver

    memset = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
    if checked(driver.cuGraphNodeGetType(node)) != memset:
        return False
    settings = checked(driver.cuGraphMemsetNodeGetParams(node))
    first = int(settings.dst) - memory.data_ptr()
    num_bytes = settings.width * settings.elementSize
    is_row_of_zeros = settings.height == 1 and settings.value == 0
    return is_row_of_zeros and first >= 0 and first + num_bytes <= memory.nbytes


def _launch(node: Any) -> bool:
    """Launch a live kernel node on the current stream, unless its arguments are unreadable."""
    from cuda.bindings import driver

    settings = checked(driver.cuGraphKernelNodeGetParams(node))
    arguments, packed = int(settings.kernelParams), int(settings.extra)  # one of them is null
    if not arguments and not packed:
        return False
    config = driver.CUlaunchConfig()
    for size in ("gridDim", "blockDim"):
        for axis in "XYZ":
            setattr(config, size + axis, getattr(settings, size + axis))
    config.sharedMemBytes = settings.sharedMemBytes
    config.hStream = torch.cuda.current_stream().cuda_stream
    attributes = _attributes(node)
    config.attrs, config.numAttrs = attributes, len(attributes)
    function = settings.func if int(settings.func) else driver.CUfunction(int(settings.kern))
    checked(driver.cuLaunchKernelEx(config, function, arguments, packed))
    return True


def _attributes(node: Any) -> list[Any]:
    from cuda.bindings import driver

    names = driver.CUlaunchAttributeID
    attributes = []
    for name, is_set in (
        (names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, lambda value: value.clusterDim.x),
        (
            names.CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE,
            lambda value: int(value.clusterSchedulingPolicyPreference),
        ),
    ):
        attribute = driver.CUlaunchAttribute()
        attribute.id = name
        attribute.value = checked(driver.cuGraphKernelNodeGetAttribute(node, name))
        if is_set(attribute.value):
            attributes.append(attribute)
    return attributes


# ---------------------------------------------------------------- gemm

# The shape alone decides which of the library's kernels runs. For many tiles these take tiles by a
# counter in memory, which the library clears before each product; that costs the GPU about 4 us.
# Clearing the `counters` of many products at once saves this time.
#
# Shape legend: T rows, I inputs, O outputs.

_ALIGNMENT = 256  # bytes; what the library's heuristic takes for granted
_STEP = 16  # bytes; from row to row
_LEAST_ROWS = 128  # below, a product is bound by reading its weights
_WORKSPACE = 32 << 20  # bytes, without a counter

# Names and numbers of cublasLt.h.
_COMPUTE_32F, _R_32F, _R_16BF = 68, 0, 14
_OP_T = 1
_DESC_TRANSA, _DESC_EPILOGUE, _DESC_BIAS_POINTER, _DESC_BIAS_TYPE = 3, 7, 8, 26
_PREF_WORKSPACE = 1
_EPILOGUE_BIAS, _EPILOGUE_GELU_BIAS = 4, 36
_CONFIG_TILE = 1
_TILE_128x288 = 421

# Preferred tiles by (inputs, outputs), for at least `_ROWS_OF_TILES` rows: the fastest on an H200,
# which the library may not rank first.
_TILES = {(1152, 3456): _TILE_128x288, (1152, 4304): _TILE_128x288}
_ROWS_OF_TILES = 6000
_NUM_CANDIDATES = 8


def can_multiply(*operands: torch.Tensor) -> bool:
    """Return whether `multiply` supports these tensors.

    All but weight and bias may have leading dimensions that can be flattened.
    """
    x, weight_OI = operands[:2]
    return (
        x.device.type == "cuda"
        and x.numel() >= _LEAST_ROWS * weight_OI.shape[1]
        and all(_is_plain(each) for each in operands)
        and runs(Kernels.TOWER_PRODUCTS, x.device)
        and _library() is not None
    )


def counters(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros((count, _ALIGNMENT), dtype=torch.uint8, device=device)


def multiply(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor,
    out_TO: torch.Tensor,
    *,
    add_TO: torch.Tensor | None = None,
    gelu: bool = False,
    counter: torch.Tensor | None = None,
) -> None:
    """Write x W^T plus the bias, plus `add_TO` if given, rounded once, to `out_TO`.

    `gelu` takes the tanh form of that and adds nothing. Rows may be strided; `out_TO` may be
    `add_TO`. `counter` is one of `counters`, cleared since its last use. Asynchronous, and can be
    captured.
    """
    assert out_TO.shape == (len(x_TI), len(weight_OI)), "one result row for each row of x"
    assert add_TO is None or not gelu, "the library would add before the gelu"
    added = out_TO if add_TO is None else add_TO
    assert all(map(_is_plain, (added, out_TO))), "rows must be aligned for the library"
    shape = _Shape(
        rows=len(x_TI),
        inputs=x_TI.shape[1],
        outputs=len(weight_OI),
        strides=(weight_OI.stride(0), x_TI.stride(0), added.stride(0), out_TO.stride(0)),
        adds=add_TO is not None,
        gelu=gelu,
        workspace=_WORKSPACE if counter is None else counter.nbytes,
    )
    _plan(shape, x_TI.device).run((weight_OI, x_TI, added, out_TO), bias_O, counter)


def _is_plain(x: torch.Tensor) -> bool:
    """Return whether rows are aligned for the library's kernels."""
    step = x.stride(-2) * x.element_size() if x.dim() > 1 else 0
    return (
        x.dtype is torch.bfloat16
        and x.stride(-1) == 1
        and step % _STEP == 0
        and x.data_ptr() % _ALIGNMENT == 0
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Shape:
    """Key of a kernel choice; `strides` of weight, x, addend and result."""

    rows: int
    inputs: int
    outputs: int
    strides: tuple[int, int, int, int]
    adds: bool
    gelu: bool
    workspace: int

    @property
    def tile(self) -> int | None:
        is_tall = self.rows >= _ROWS_OF_TILES
        return _TILES.get((self.inputs, self.outputs)) if is_tall else None


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
    """One shape on one device; A is the weight and B is x."""

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
            self._stream = recording_stream(device)
            self._layouts = [
                _made(library.cublasLtMatrixLayoutCreate, _R_16BF, *map(ctypes.c_int64, layout))
                for layout in zip(lengths, counts, shape.strides, strict=True)
            ]
            candidates = self._candidates()
            preferred = (each for each in candidates if self._tile(each) == shape.tile)
            self._choice = next(preferred, candidates[0])

    def run(
        self,
        matrices: tuple[torch.Tensor, ...],
        bias_O: torch.Tensor,
        counter: torch.Tensor | None,
    ) -> None:
        """Enqueue the product; `matrices` are A, B, C and D."""
        workspace = counter
        if workspace is None:
            size = self._choice.workspace
            workspace = torch.empty(size, dtype=torch.uint8, device=self._device)

        def enqueue(stream: int) -> None:
            self._enqueue(matrices, bias_O, workspace, stream)

        # In a call outside of captures, recording would cost more than the clearing.
        records = counter is not None and torch.cuda.is_current_stream_capturing()
        if not records or not launch_cleared(self._stream, enqueue, workspace):
            enqueue(torch.cuda.current_stream(self._device).cuda_stream)

    def _enqueue(
        self,
        matrices: tuple[torch.Tensor, ...],
        bias_O: torch.Tensor,
        workspace: torch.Tensor,
        stream: int,
    ) -> None:
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
            ctypes.c_size_t(workspace.nbytes),
            ctypes.c_void_p(stream),
        )
        _check(self._library.cublasLtMatmulDescDestroy(description))
        _check(status)

    def _candidates(self) -> list[_Choice]:
        library, candidates, count = self._library, (_Choice * _NUM_CANDIDATES)(), ctypes.c_int()
        preference = _made(library.cublasLtMatmulPreferenceCreate)
        limit = ctypes.c_uint64(self._shape.workspace)
        _set(library.cublasLtMatmulPreferenceSetAttribute, preference, _PREF_WORKSPACE, limit)
        description = self._describe(_ALIGNMENT)
        status = library.cublasLtMatmulAlgoGetHeuristic(
            self._handle,
            description,
            *self._layouts,
            preference,
            _NUM_CANDIDATES,
            candidates,
            ctypes.byref(count),
        )
        _check(library.cublasLtMatmulDescDestroy(description))
        _check(library.cublasLtMatmulPreferenceDestroy(preference))
        _check(status)
        possible = [each for each in candidates[: count.value] if each.state == 0]
        if not possible:
            raise InternalError(f"cublasLt has no product of this shape: {self._shape}")
        return possible

    def _tile(self, choice: _Choice) -> int:
        tile, written = ctypes.c_int(), ctypes.c_size_t()
        status = self._library.cublasLtMatmulAlgoConfigGetAttribute(
            ctypes.byref(choice.algorithm),
            ctypes.c_int(_CONFIG_TILE),
            ctypes.byref(tile),
            ctypes.c_size_t(ctypes.sizeof(tile)),
            ctypes.byref(written),
        )
        _check(status)
        return tile.value

    def _describe(self, bias: int) -> ctypes.c_void_p:
        library = self._library
        description = _made(library.cublasLtMatmulDescCreate, _COMPUTE_32F, _R_32F)
        epilogue = _EPILOGUE_GELU_BIAS if self._shape.gelu else _EPILOGUE_BIAS
        for attribute, value in (
            (_DESC_TRANSA, ctypes.c_int32(_OP_T)),
            (_DESC_EPILOGUE, ctypes.c_int32(epilogue)),
            (_DESC_BIAS_TYPE, ctypes.c_int32(_R_16BF)),
            (_DESC_BIAS_POINTER, ctypes.c_void_p(bias)),
        ):
            _set(library.cublasLtMatmulDescSetAttribute, description, attribute, value)
        return description


_plan = functools.cache(_Plan)


@functools.cache
def _library() -> Any:
    """Return the library that torch has loaded, or None if it is not found by name."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError:
        return None


@functools.cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    """Kept for the life of the process; the device is the current one."""
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
