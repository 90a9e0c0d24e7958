"""The guard of a warm loop: no synchronisation but the wait for results, and no allocation."""

from __future__ import annotations

import contextlib
import gc
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc, runtime
from legato_engine.bench.workload import fixed_length
from legato_engine.core.assembly import Assembly
from legato_engine.core.requests import make_sequence
from legato_engine.device.cuda import no_collections
from legato_engine.scheduler.batch import LaunchKind, StepRecord
from legato_engine.scheduler.output import SilentSink
from legato_engine.scheduler.scheduler import Scheduler
from legato_engine.types import QuerySpec, Request, RequestKey, SamplingParams
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# ---------------------------------------------------------------- decodes
# Schedulers whose rows all decode, for the guard.

ROWS = 4
RANKS = {"x": 8, "y": 64}
"""Adapters by name."""


def close(assembly: Assembly) -> None:
    """Give its memory back."""
    assembly.device.close()
    gc.collect()
    torch.cuda.empty_cache()


class Decodes(SilentSink):
    """Counts of committed launches.

    By kind, with draft tokens, prompts with a loop's rows, parts of prompts, and loops whose
    constraints follow tokens in flight.
    """

    def __init__(self) -> None:
        self.kinds: list[LaunchKind] = []
        self.drafted = self.behind = self.parts = self.following = 0

    def committed(self, record: StepRecord) -> None:
        """Count it."""
        self.kinds.append(record.launch.plan.kind)
        self.drafted += record.drafted
        plan = record.launch.plan
        self.behind += bool(plan.behind and plan.prefills)
        self.parts += plan.has_partial_prefill
        self.following += bool(plan.after)


def decoding(
    assembly: Assembly, seen: Decodes, *, length: int, adapters: tuple[str, ...] = ()
) -> Scheduler:
    """Return a scheduler whose rows all decode, and have answers of `length` tokens."""
    scheduler = assembly.scheduler(seen, pipeline_depth=2, observer=seen.committed)
    frontend, model = assembly.frontend, assembly.model
    for index in range(ROWS):
        request = Request(
            request_id=RequestKey(str(index)),
            task=QuerySpec(question="What? " * 3),
            sampling=SamplingParams(temperature=0.8 * (index % 2), seed=index),
        )
        adapter = None
        if index < len(adapters):
            name = adapters[index]
            data = (Path(assembly.config.adapters) / f"{name}.safetensors").read_bytes()
            adapter = model.read_adapter(data, name, max(RANKS.values()))
        sequence = make_sequence(frontend, request, None, adapter)
        constraints = range(len(frontend.constraints))
        scheduler.submit(fixed_length(sequence, length, 0, constraints))
    for _ in range(2 * ROWS + 4):
        scheduler.step()
    assert scheduler.load().running == ROWS
    return scheduler


# ---------------------------------------------------------------- guard

_MODULES = (driver, nvrtc, runtime)
_COPIES = {"cudaMemcpyAsync": (0, 1), "cudaMemcpy2DAsync": (0, 2)}
"""The arguments of copies that are addresses."""
GRAPHS = "cuGraphLaunch"
KERNELS = "cuLaunchKernelEx"
_pointer_attribute = driver.cuPointerGetAttribute


class GuardViolation(AssertionError):
    """A call that a warm loop must not make."""


class GraphsOnly(TorchDispatchMode):
    """Raises on operations of this thread on a device's tensors, which launch outside a graph.

    Views are none, and a copy between contiguous tensors of one dtype is no kernel.
    """

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = self._tensors(args), self._tensors(out)
        mutates = func._schema.is_mutable
        addresses = {each.untyped_storage().data_ptr() for each in given}
        is_view = all(each.untyped_storage().data_ptr() in addresses for each in made)
        if (given or made) and (mutates or not is_view) and not _is_transfer(func, args):
            raise GuardViolation(f"a warm loop runs {func} outside a graph")
        return out

    def _tensors(self, tree: Any) -> list[torch.Tensor]:
        leaves = tree_leaves(tree)
        tensors = (each for each in leaves if isinstance(each, torch.Tensor))
        return [each for each in tensors if each.device.type == self._device]


def _is_transfer(func: Any, args: tuple[Any, ...]) -> bool:
    if func is not torch.ops.aten.copy_.default:
        return False
    to, source = args[:2]
    plain = to.is_contiguous() and source.is_contiguous()
    return plain and to.dtype is source.dtype and to.shape == source.shape


@contextlib.contextmanager
def guarded(*launches: str) -> Iterator[None]:
    """Raise on what a warm loop must not do; without `launches` it launches graphs alone.

    - torch: any synchronisation, any use of its allocator, and without `launches` any operation
      that `GraphsOnly` refuses.
    - cuda.bindings: any call but these launches, of graphs whose kernels were captured before, and
      asynchronous copies between memory of the device and page-locked memory.
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
            addresses = _COPIES.get(name) if module is runtime else None
            checked = _refusing(name) if addresses is None else _checking_copy(call, addresses)
            setattr(module, name, checked)
        torch.cuda.set_sync_debug_mode("error")
        try:
            with contextlib.nullcontext() if launches else GraphsOnly():
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


def _checking_copy(call: Callable[..., Any], addresses: tuple[int, ...]) -> Callable[..., Any]:
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE

    def copy(*arguments: Any) -> Any:
        for index in addresses:
            result, _ = _pointer_attribute(attribute, arguments[index])
            if result != driver.CUresult.CUDA_SUCCESS:
                raise GuardViolation("a warm loop copies from or to memory that is not page-locked")
        return call(*arguments)

    return copy
