"""Compilation of CUDA C++ by NVRTC, and launches on torch's current stream."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import importlib.resources
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources.abc import Traversable
from typing import Any, TypeVar

import torch

from legato_engine.errors import InternalError
from legato_engine.kernels.cache import cache_folder, store
from legato_engine.kernels.cuda import capability
from legato_engine.kernels.cuda.capability import Feature, gpu_of_arch, macros

_SOURCES = "sources"
_Made = TypeVar("_Made")
_ahead: dict[str, bytes] = {}  # compiled and not taken yet, where the cache may not be writable


def compile_source(
    name: str, defines: Mapping[str, int], arch: str, *, folder: Traversable | None = None
) -> bytes:
    """Compile the file `name` for an `arch` such as sm_90 or compute_80, or read the cache.

    The code of a virtual architecture is PTX, which the driver compiles. `folder` is by default
    `sources`. `#include "x"` finds the headers of both; there are no system headers.

    Raises:
        InternalError: the source does not compile; the text has the compiler's log.
    """
    texts, options = _texts(folder), _options(defines, arch)
    key = _key(name, texts, options)
    is_virtual = gpu_of_arch(arch).is_virtual
    path = cache_folder() / f"{key}.{'ptx' if is_virtual else 'cubin'}"
    if (ready := _ahead.pop(key, None)) is not None:
        return ready
    if path.is_file():
        return path.read_bytes()
    code = _compile(name, texts, options, is_virtual=is_virtual)
    store(path, code)
    return code


def compile_ahead(
    name: str,
    several: Sequence[Mapping[str, int]],
    arch: str,
    *,
    folder: Traversable | None = None,
) -> None:
    """Compile a file with each of several `defines` in parallel, ahead of `compile_source`."""
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        codes = pool.map(
            lambda defines: compile_source(name, defines, arch, folder=folder), several
        )
        for defines, code in zip(several, codes, strict=True):
            _ahead[_key(name, _texts(folder), _options(defines, arch))] = code


def _texts(folder: Traversable | None) -> dict[str, str]:
    return sources() if folder is None else sources() | _read(folder)


def _options(defines: Mapping[str, int], arch: str) -> tuple[str, ...]:
    return (
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--device-as-default-execution-space",
        "--extra-device-vectorization",
        *(f"-D{key}={value}" for key, value in sorted({**macros(arch), **defines}.items())),
    )


@functools.cache
def sources() -> dict[str, str]:
    return _read(importlib.resources.files(__package__) / _SOURCES)


def _read(folder: Traversable) -> dict[str, str]:
    sources = (".cu", ".cuh")
    return {file.name: file.read_text() for file in folder.iterdir() if file.name.endswith(sources)}


def _key(name: str, texts: Mapping[str, str], options: tuple[str, ...]) -> str:
    from cuda.bindings import nvrtc

    digest = hashlib.sha256(repr((nvrtc.nvrtcVersion(), name, options)).encode())
    for file, text in sorted(texts.items()):
        digest.update(f"{file}\0{text}\0".encode())
    return digest.hexdigest()[:32]


def _compile(
    name: str, texts: Mapping[str, str], options: tuple[str, ...], *, is_virtual: bool
) -> bytes:
    from cuda.bindings import nvrtc

    headers = {file: header for file, header in texts.items() if file.endswith(".cuh")}
    program = checked(
        nvrtc.nvrtcCreateProgram(
            texts[name].encode(),
            name.encode(),
            len(headers),
            [header.encode() for header in headers.values()],
            [file.encode() for file in headers],
        )
    )
    encoded = [option.encode() for option in options]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise InternalError(f"{name} does not compile: {log.decode().strip()}")
    size, read = nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN
    if is_virtual:
        size, read = nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX
    code: bytes = b" " * checked(size(program))
    checked(read(program, code))
    nvrtc.nvrtcDestroyProgram(program)
    return code


# ---------------------------------------------------------------- module


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TensorMap:
    """The copy engine's description of a tensor."""

    encoded: Any


Argument = torch.Tensor | TensorMap | int | float | None


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
        gpu = capability.current_gpu()
        self.can_overlap = gpu.has(Feature.OVERLAP)
        self._code = compile_source(name, defines, gpu.arch(own=own), folder=folder)
        self._module = checked(driver.cuModuleLoadData(self._code))

    def kernel(self, name: str, *, shared: int = 0) -> Kernel:
        from cuda.bindings import driver

        function = checked(driver.cuModuleGetFunction(self._module, name.encode()))
        if shared:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(function, limit, shared))
        return Kernel(self, function, shared)


def made_on(device: torch.device, make: Callable[..., _Made], *constants: Hashable) -> _Made:
    """Return what `make(*constants)` compiles for a device, once."""
    made: _Made = _made_on(device, make, *constants)
    return made


@functools.cache
def _made_on(device: torch.device, make: Callable[..., Any], *constants: Hashable) -> Any:
    with torch.cuda.device(device):
        return make(*constants)


Compile = Callable[..., Module]
"""Builds a module of a source, as `Module` does for the current device."""


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
    """Return an answer of the driver or of NVRTC: nothing, a value, or a tuple of several.

    Raises:
        InternalError: it is a failure.
    """
    result, *values = answer
    if result.value:  # success is 0 of both
        origin = "NVRTC" if result.name.startswith("NVRTC") else "CUDA driver"
        raise InternalError(f"{origin}: {result.name}")
    return tuple(values) if len(values) > 1 else values[0] if values else None
