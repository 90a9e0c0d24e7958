"""Launches of a library's kernel without the clearing that the library puts before it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from legato_engine.errors import InternalError


class LibraryLauncher:
    """Launches on one device; created outside of any capture."""

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver

        with torch.cuda.device(device):
            torch.cuda.current_stream(device)  # the context exists from here on
            flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            # Not one of torch's streams, which are reused and may be capturing by then.
            self._stream = _checked(driver.cuStreamCreate(flags))

    def launch_cleared(self, enqueue: Callable[[int], None], cleared: torch.Tensor) -> bool:
        """Enqueue on torch's current stream the one kernel that `enqueue` submits to a stream.

        `enqueue` also zeroes bytes of `cleared`; that is left out, so the caller must have zeroed
        them. Return False, with nothing launched, if it does anything else, or does not clear. The
        kernel begins after the preceding one has ended, because a library's kernel need not wait by
        itself. Can be captured.
        """
        with self._recorded(enqueue) as graph:
            kernels, others = _nodes(graph)
            clears = [node for node in others if _only_clears(node, cleared)]
            if len(kernels) != 1 or not clears or clears != others:
                return False
            return _launch(kernels[0])

    @contextlib.contextmanager
    def _recorded(self, enqueue: Callable[[int], None]) -> Iterator[Any]:
        """The graph of `enqueue`, independent of any current capture and never run."""
        from cuda.bindings import driver

        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        _checked(driver.cuStreamBeginCapture(self._stream, mode))
        try:
            enqueue(int(self._stream))
        finally:
            graph = _checked(driver.cuStreamEndCapture(self._stream))
        try:
            yield graph
        finally:
            _checked(driver.cuGraphDestroy(graph))


def _nodes(graph: Any) -> tuple[list[Any], list[Any]]:
    from cuda.bindings import driver

    _, count = _checked(driver.cuGraphGetNodes(graph))
    nodes, _ = _checked(driver.cuGraphGetNodes(graph, count))
    kind = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    kernels = [node for node in nodes if _checked(driver.cuGraphNodeGetType(node)) == kind]
    return kernels, [node for node in nodes if node not in kernels]


def _only_clears(node: Any, memory: torch.Tensor) -> bool:
    from cuda.bindings import driver

    memset = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
    if _checked(driver.cuGraphNodeGetType(node)) != memset:
        return False
    settings = _checked(driver.cuGraphMemsetNodeGetParams(node))
    first = int(settings.dst) - memory.data_ptr()
    num_bytes = settings.width * settings.elementSize
    is_row_of_zeros = settings.height == 1 and settings.value == 0
    return is_row_of_zeros and first >= 0 and first + num_bytes <= memory.nbytes


def _launch(node: Any) -> bool:
    """The node must be live."""
    from cuda.bindings import driver

    settings = _checked(driver.cuGraphKernelNodeGetParams(node))
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
    _checked(driver.cuLaunchKernelEx(config, function, arguments, packed))
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
        attribute.value = _checked(driver.cuGraphKernelNodeGetAttribute(node, name))
        if is_set(attribute.value):
            attributes.append(attribute)
    return attributes


def _checked(answer: tuple[Any, ...]) -> Any:
    from cuda.bindings import driver

    result, *values = answer
    if result != driver.CUresult.CUDA_SUCCESS:
        raise InternalError(f"CUDA driver: {result.name}")
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None
