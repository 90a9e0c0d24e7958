"""The guard of a warm loop: no synchronisation but the wait for results, and no allocation."""

from __future__ import annotations

import contextlib
import gc
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from cuda.bindings import driver, nvrtc, runtime
from legato_engine.device.cuda import no_collections

_MODULES = (driver, nvrtc, runtime)
_COPY = "cudaMemcpyAsync"
GRAPHS = "cuGraphLaunch"
KERNELS = "cuLaunchKernelEx"
_pointer_attribute = driver.cuPointerGetAttribute


class GuardViolation(AssertionError):
    """A call that a warm loop must not make."""


@contextlib.contextmanager
def guarded(*launches: str) -> Iterator[None]:
    """Raise on what a warm loop must not do; without `launches` it launches graphs alone.

    - torch: any synchronisation, and any use of its allocator.
    - cuda.bindings: any call but these launches, of graphs whose kernels were captured before, and
      an asynchronous copy between memory of the device and page-locked memory.
    - Device memory: none more is in use at the end.

    Garbage of earlier engines is collected before, as its finalizers call CUDA, and not meanwhile.
    """
    gc.collect()
    with no_collections():
        torch.cuda.synchronize()
        allocated, free = _allocations(), torch.cuda.mem_get_info()[0]
        changed = [(module, name, call) for module in _MODULES for name, call in _functions(module)]
        for module, name, call in changed:
            if name in (launches or (GRAPHS,)):
                continue
            allowed = name == _COPY and module is runtime
            setattr(module, name, _checking_copy(call) if allowed else _refusing(name))
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
            for module, name, call in changed:
                setattr(module, name, call)
        if _allocations() != allocated:
            raise GuardViolation(f"torch allocated {_allocations() - allocated} times")
        torch.cuda.synchronize()
        left = torch.cuda.mem_get_info()[0]
        if left != free:
            raise GuardViolation(f"{free - left} bytes of device memory are used that were free")


def _allocations() -> int:
    count: int = torch.cuda.memory_stats()["allocation.all.allocated"]
    return count


def _functions(module: types.ModuleType) -> list[tuple[str, Callable[..., Any]]]:
    return [
        (name, call)
        for name, call in vars(module).items()
        if name.startswith(("cu", "nvrtc")) and callable(call) and not isinstance(call, type)
    ]


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*arguments: Any) -> Any:
        raise GuardViolation(f"a warm loop calls {name}")

    return refuse


def _checking_copy(call: Callable[..., Any]) -> Callable[..., Any]:
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE

    def copy(to: int, source: int, *rest: Any) -> Any:
        for address in (to, source):
            result, _ = _pointer_attribute(attribute, address)
            if result != driver.CUresult.CUDA_SUCCESS:
                raise GuardViolation("a warm loop copies from or to memory that is not page-locked")
        return call(to, source, *rest)

    return copy
