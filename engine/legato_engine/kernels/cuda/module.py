"""Compiled kernels on the current GPU, launched into torch's current stream."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping, Sequence
from importlib.resources.abc import Traversable
from typing import Any, Protocol

import torch

from legato_engine.errors import InternalError
from legato_engine.kernels.cuda.compiler import compile_source


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TensorMap:
    """The copy engine's description of a tensor."""

    encoded: Any


Argument = torch.Tensor | TensorMap | int | float | None
_OVERLAPS = (9, 0)  # compute capability from which launches may overlap


class Launches(Protocol):
    """A kernel, as `Kernel` is one."""

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Argument],
        *,
        cooperative: bool = False,
    ) -> None: ...


class Kernels(Protocol):
    """A compiled source, as `Module` is one."""

    def kernel(self, name: str, *, shared: int = 0) -> Launches: ...


class Compile(Protocol):
    """What makes one; `Module` compiles for the current device."""

    def __call__(
        self, name: str, defines: Mapping[str, int], *, own: bool, folder: Traversable | None
    ) -> Kernels: ...


class Module:
    """A source compiled for the current device, with constants `defines`."""

    def __init__(
        self,
        name: str,
        defines: Mapping[str, int],
        *,
        own: bool = False,
        folder: Traversable | None = None,
    ) -> None:
        """`folder` as in `compile_source`.

        `own` allows instructions that later architectures do not have.
        """
        from cuda.bindings import driver

        torch.cuda.current_stream()  # the context exists from here on
        self.can_overlap = torch.cuda.get_device_capability() >= _OVERLAPS
        self._code = compile_source(name, defines, current_arch(own=own), folder=folder)
        self._module = checked(driver.cuModuleLoadData(self._code))

    def kernel(self, name: str, *, shared: int = 0) -> Kernel:
        from cuda.bindings import driver

        function = checked(driver.cuModuleGetFunction(self._module, name.encode()))
        if shared:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(function, limit, shared))
        return Kernel(self, function, shared)


class Kernel:
    """One kernel. Launches are asynchronous and can be captured."""

    def __init__(self, module: Module, function: Any, shared: int) -> None:
        self._module = module  # unloaded with its last kernel
        self._function = function
        self._shared = shared

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Argument],
        *,
        shared: int | None = None,
        cluster: int = 1,
        overlap: bool = False,
        cooperative: bool = False,
    ) -> None:
        """Enqueue on torch's current stream; `cooperative` thread blocks all run at once.

        Tensors and None pass as pointers, ints as int32, floats as float32. `cluster` thread blocks
        along x share their memory. `overlap` (programmatic dependent launch) lets the kernel begin
        before the preceding one has ended, if the GPU supports it; it waits for results by
        `griddepcontrol.wait`.
        """
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self._shared if shared is None else shared
        config.hStream = torch.cuda.current_stream().cuda_stream
        attributes = _attributes(cluster, overlap and self._module.can_overlap, cooperative)
        config.attrs, config.numAttrs = attributes, len(attributes)
        values, types = zip(*map(_parameter, arguments), strict=True)
        checked(driver.cuLaunchKernelEx(config, self._function, (values, types), 0))

    def per_processor(self, threads: int) -> int:
        """Thread blocks, without clusters, that a multiprocessor runs at once."""
        from cuda.bindings import driver

        count = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
        return int(checked(count(self._function, threads, self._shared)))


def current_arch(*, own: bool = False) -> str:
    """The current device's; `own` has instructions that later architectures do not have."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}{'a' if own else ''}"


def tensor_map(x: torch.Tensor, box: Sequence[int]) -> TensorMap:
    """Describe a bf16 tensor [..., E] by boxes of `box` values along each dimension.

    Box rows have 128 or 32 bytes, swizzled by that width in shared memory; values outside of x
    become zero. Rows of x are contiguous; its address and other strides are multiples of 16 bytes.
    """
    from cuda.bindings import driver

    swizzle = driver.CUtensorMapSwizzle
    width = {128: swizzle.CU_TENSOR_MAP_SWIZZLE_128B, 32: swizzle.CU_TENSOR_MAP_SWIZZLE_32B}
    strides = [stride * x.element_size() for stride in reversed(x.stride()[:-1])]
    encoded = checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            x.dim(),
            x.data_ptr(),
            [driver.cuuint64_t(size) for size in reversed(x.shape)],
            [driver.cuuint64_t(stride) for stride in strides],
            [driver.cuuint32_t(size) for size in reversed(box)],
            [driver.cuuint32_t(1)] * x.dim(),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            width[box[-1] * x.element_size()],
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return TensorMap(encoded)


def _attributes(cluster: int, overlap: bool, cooperative: bool) -> list[Any]:
    from cuda.bindings import driver

    attributes = []
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x = cluster
        attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
        attributes.append(attribute)
    if overlap:
        attribute = driver.CUlaunchAttribute()
        attribute.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if cooperative:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        attributes.append(attribute)
    return attributes


def _parameter(argument: Argument) -> tuple[Any, Any]:
    if argument is None:
        return 0, ctypes.c_void_p
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr(), ctypes.c_void_p
    if isinstance(argument, TensorMap):
        return argument.encoded, None
    if isinstance(argument, int):
        return argument, ctypes.c_int32
    return argument, ctypes.c_float


def checked(answer: tuple[Any, ...]) -> Any:
    """The driver's answer: nothing, a value, or a tuple of several.

    Raises:
        InternalError: it is a failure.
    """
    from cuda.bindings import driver

    result, *values = answer
    if result != driver.CUresult.CUDA_SUCCESS:
        raise InternalError(f"CUDA driver: {result.name}")
    return tuple(values) if len(values) > 1 else values[0] if values else None
