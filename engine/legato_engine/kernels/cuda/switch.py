"""A choice between captured graphs on the device, by a conditional node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from legato_engine.kernels.cuda.module import Module, checked

SOURCE = "choose.cu"
_WORD = 1 << 32


class Switch:
    """Runs `graphs[index]`, if there is one, with an index that earlier work has written. A single
    graph always runs.

    In captured work it becomes a conditional node whose branches are copies of the graphs, so the
    host neither waits nor knows the choice. Outside it waits for the index.
    """

    def __init__(self, index: torch.Tensor, graphs: Sequence[torch.cuda.CUDAGraph]) -> None:
        """`index` is an int32 [1]; the graphs were captured with `keep_graph`."""
        assert index.dtype is torch.int32, f"an index of {index.dtype}"
        self._index = index
        self._graphs = tuple(graphs)
        self._choose = Module(SOURCE, {}).kernel("choose")

    def __call__(self) -> None:
        single = len(self._graphs) == 1
        if torch.cuda.is_current_stream_capturing():
            if single:
                add_graph(torch.cuda.current_stream().cuda_stream, self._graphs[0])
            else:
                self._add_node()
        else:
            which = 0 if single else int(self._index)
            if which < len(self._graphs):
                self._graphs[which].replay()

    def _add_node(self) -> None:
        from cuda.bindings import driver

        stream = torch.cuda.current_stream().cuda_stream
        graph, _, _ = _capture_of(stream)
        context = checked(driver.cuCtxGetCurrent())
        handle = checked(driver.cuGraphConditionalHandleCreate(graph, context, 0, 0))
        low, high = int(handle) % _WORD, int(handle) // _WORD
        self._choose.launch((1, 1, 1), 32, [self._index, _signed(low), _signed(high)])
        _, before, edges = _capture_of(stream)
        node = driver.CUgraphNodeParams()
        node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        node.conditional.handle = handle
        node.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_SWITCH
        node.conditional.size = len(self._graphs)
        node.conditional.ctx = context
        added = checked(driver.cuGraphAddNode(graph, before, edges, len(before), node))
        for branch, captured in zip(node.conditional.phGraph_out, self._graphs, strict=True):
            child = driver.CUgraph(captured.raw_cuda_graph())
            checked(driver.cuGraphAddChildGraphNode(branch, None, 0, child))
        _continue_after(stream, added)


def add_graph(stream: int, captured: torch.cuda.CUDAGraph) -> None:
    """Add a copy of a graph to the capture of a stream; it has no conditional nodes."""
    from cuda.bindings import driver

    graph, before, _ = _capture_of(stream)
    child = driver.CUgraph(captured.raw_cuda_graph())
    _continue_after(
        stream, checked(driver.cuGraphAddChildGraphNode(graph, before, len(before), child))
    )


def _continue_after(stream: int, node: Any) -> None:
    from cuda.bindings import driver

    replace = driver.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
    checked(driver.cuStreamUpdateCaptureDependencies(stream, [node], None, 1, replace))


def _capture_of(stream: int) -> tuple[Any, Any, Any]:
    """The graph under capture, the nodes that the next one follows, and their edges."""
    from cuda.bindings import driver

    _, _, graph, nodes, edges, count = checked(driver.cuStreamGetCaptureInfo(stream))
    return graph, nodes[:count], edges[:count]


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word
