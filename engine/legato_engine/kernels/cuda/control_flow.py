"""Conditional nodes of CUDA graphs: switch and while loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from legato_engine.device.base import CapturedGraph
from legato_engine.kernels.cuda.module import Argument, Module, checked
from legato_engine.kernels.decode_loop import DraftLoopTensors, Loop

SWITCH_SOURCE = "choose.cu"
_WORD = 1 << 32


class Switch:
    """Runs `graphs[index]`, if there is one, with an index written by earlier work.

    A single graph always runs.

    In captured work it becomes a conditional node whose branches are copies of the graphs, so the
    host neither waits nor knows the choice. Outside it waits for the index.
    """

    def __init__(self, index: torch.Tensor, graphs: Sequence[torch.cuda.CUDAGraph]) -> None:
        """`index` is an int32 [1]; the graphs were captured with `keep_graph`."""
        assert index.dtype is torch.int32, f"an index of {index.dtype}"
        self._index = index
        self._graphs = tuple(graphs)
        self._choose = Module(SWITCH_SOURCE, {}).kernel("choose")

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
        kind = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_SWITCH
        node = _conditional(kind, handle, context, len(self._graphs))
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


def _conditional(kind: Any, handle: Any, context: Any, num_branches: int) -> Any:
    from cuda.bindings import driver

    node = driver.CUgraphNodeParams()
    node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    node.conditional.handle = handle
    node.conditional.type = kind
    node.conditional.size = num_branches
    node.conditional.ctx = context
    return node


def _continue_after(stream: int, node: Any) -> None:
    from cuda.bindings import driver

    replace = driver.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
    checked(driver.cuStreamUpdateCaptureDependencies(stream, [node], None, 1, replace))


def _capture_of(stream: int) -> tuple[Any, Any, Any]:
    """Return the graph under capture, the nodes that the next one follows, and their edges."""
    from cuda.bindings import driver

    _, _, graph, nodes, edges, count = checked(driver.cuStreamGetCaptureInfo(stream))
    return graph, nodes[:count], edges[:count]


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word


# ---------------------------------------------------------------- while loop

# Shape legend as in `kernels.decode_loop`.

LOOP_SOURCE = "decode_loop.cu"
_THREADS = 128
_WIDTH = 16  # bytes that a thread copies at once


class WhileLoop:
    """Runs `works` in turn, then the control step, until that says so; at least once.

    The graph is one launch. It holds copies of the captured graphs among the works, which were
    captured with `keep_graph`, and captures the others, which may have conditional nodes but
    allocate nothing.
    """

    def __init__(self, works: Sequence[Callable[[], None]], loop: Loop) -> None:
        """Build the graph; tensors are at fixed addresses, those of the ring page-locked."""
        from cuda.bindings import driver

        self._name, self._arguments = _control(loop)
        self._control = Module(LOOP_SOURCE, {}).kernel(self._name)
        self._works, self._loop = tuple(works), loop
        self._whole = checked(driver.cuGraphCreate(0))
        context = checked(driver.cuCtxGetCurrent())
        first = driver.CU_GRAPH_COND_ASSIGN_DEFAULT
        handle = checked(driver.cuGraphConditionalHandleCreate(self._whole, context, 1, first))
        kind = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        node = _conditional(kind, handle, context, 1)
        checked(driver.cuGraphAddNode(self._whole, None, None, 0, node))
        body = node.conditional.phGraph_out[0]
        stream = torch.cuda.current_stream().cuda_stream
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        checked(driver.cuStreamBeginCaptureToGraph(stream, body, None, None, 0, mode))
        try:
            for work in self._works:
                if isinstance(work, CapturedGraph):
                    add_graph(stream, work.graph)
                else:
                    work()
            self._launch_control(int(handle))
        finally:
            checked(driver.cuStreamEndCapture(stream))
        self._ready = checked(driver.cuGraphInstantiate(self._whole, 0))

    def __call__(self) -> None:
        from cuda.bindings import driver

        stream = torch.cuda.current_stream().cuda_stream
        checked(driver.cuGraphLaunch(self._ready, stream))

    def _launch_control(self, handle: int) -> None:
        loop = self._loop
        low, high = handle % _WORD, handle // _WORD
        self._control.launch(
            (1, 1, 1),
            _THREADS,
            [
                *self._arguments,
                *(loop.token_B, loop.constraint_B, loop.successor_C2, loop.outputs_N),
                *(loop.limit, loop.step, loop.ring_SN, loop.words),
                *(len(loop.constraint_B), len(loop.outputs_N) // _WIDTH, loop.scratch_row),
                *(_signed(low), _signed(high)),
            ],
        )


def _control(loop: Loop) -> tuple[str, list[Argument]]:
    """Return the name of the control step's kernel and its first arguments."""
    if isinstance(loop, DraftLoopTensors):
        rows = [loop.row_B, loop.room_B, loop.reach_B, loop.start_B, loop.count_B]
        return "control_drafts", [*rows, loop.position_R, loop.limit_R]
    return "control", [loop.row_B, loop.position_B, loop.fresh_B, loop.sample_position_B]
