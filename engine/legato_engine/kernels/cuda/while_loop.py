"""A loop over captured graphs on the device, by a conditional node.

Shape legend as in `kernels.decode_loop`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from legato_engine.kernels.cuda.module import Module, checked
from legato_engine.kernels.decode_loop import LoopTensors

SOURCE = "decode_loop.cu"
_THREADS = 128
_WIDTH = 16  # bytes that a thread copies at once
_WORD = 1 << 32


class WhileLoop:
    """Runs `graphs` in turn, then the control step, until that says so; at least once.

    The graph is one launch. It holds copies of the graphs, which were captured with `keep_graph`.
    """

    def __init__(self, graphs: Sequence[torch.cuda.CUDAGraph], loop: LoopTensors) -> None:
        """The tensors are at fixed addresses; the ring's are page-locked."""
        from cuda.bindings import driver

        self._control = Module(SOURCE, {}).kernel("control")
        self._graphs, self._loop = tuple(graphs), loop
        self._whole = checked(driver.cuGraphCreate(0))
        context = checked(driver.cuCtxGetCurrent())
        first = driver.CU_GRAPH_COND_ASSIGN_DEFAULT
        handle = checked(driver.cuGraphConditionalHandleCreate(self._whole, context, 1, first))
        node = driver.CUgraphNodeParams()
        node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        node.conditional.handle = handle
        node.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        node.conditional.size = 1
        node.conditional.ctx = context
        checked(driver.cuGraphAddNode(self._whole, None, None, 0, node))
        body = node.conditional.phGraph_out[0]
        last = None
        for captured in self._graphs:
            before: list[object] = [] if last is None else [last]
            child = driver.CUgraph(captured.raw_cuda_graph())
            last = checked(driver.cuGraphAddChildGraphNode(body, before, len(before), child))
        stream = torch.cuda.current_stream().cuda_stream
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        checked(driver.cuStreamBeginCaptureToGraph(stream, body, [last], None, 1, mode))
        try:
            self._launch_control(int(handle))
        finally:
            checked(driver.cuStreamEndCapture(stream))
        self._ready = checked(driver.cuGraphInstantiate(self._whole, 0))

    def __call__(self) -> None:
        """Enqueue the loop on torch's current stream."""
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
                *(loop.row_B, loop.position_B, loop.fresh_B, loop.sample_position_B),
                *(loop.token_B, loop.constraint_B, loop.successor_C2, loop.outputs_N),
                *(loop.limit, loop.step, loop.ring_SN, loop.words),
                *(len(loop.token_B), len(loop.outputs_N) // _WIDTH, loop.scratch_row),
                *(_signed(low), _signed(high)),
            ],
        )


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word
