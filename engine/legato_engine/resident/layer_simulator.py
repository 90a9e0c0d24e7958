"""What the instructions of a layer do, in the simulator."""

from __future__ import annotations

import random

import numpy as np

from legato_engine.resident.instructions import Instruction
from legato_engine.resident.maps import Floats, gelu
from legato_engine.resident.simulator_state import Memory, Work, Worker, Write, nothing, own_head
from legato_engine.resident.sizes import BLOCK, HEAD_DIM, PAGE, SPLITS, ModelSizes
from legato_engine.resident.stream import Matrix, qkv_rows
from legato_engine.resident.weights import Cache, Weights, angles


class LayerWork(Work):
    """From a layer's norm to its sum; attention is to `cache` and to what the launch wrote."""

    def __init__(
        self,
        sizes: ModelSizes,
        weights: Weights,
        memory: Memory,
        chance: random.Random,
        cache: Cache,
    ) -> None:
        super().__init__(sizes, weights, memory, chance)
        self._cache = cache

    def fc1(self, worker: Worker, it: Instruction, _step: int, _event: int) -> Write:
        rows = self._block_rows(it)
        worker.held = self.source(worker, it).copy()
        act = gelu(self._project(worker, it, rows))

        def write() -> None:
            self._memory.act[: len(act), rows] = act

        return write

    def qkv(self, worker: Worker, it: Instruction, _step: int, _event: int) -> Write:
        num = self._sizes.num_workers
        rows = [row for i in range(3) for row in qkv_rows(it.block + i * num)]
        q, k, v = np.split(self._project(worker, it, rows), 3, axis=1)
        dims = rows[:BLOCK]
        first = dims[0] % HEAD_DIM
        if first < 32:
            turns = [angles(self._cache.length + each.position) for each in worker.placed]
            cosine, sine = (
                np.stack(each)[:, first : first + 8] for each in zip(*turns, strict=True)
            )
            q, k = (_turn(each, cosine, sine) for each in (q, k))
        placed = worker.placed

        def write() -> None:
            self._memory.q[: len(q), dims] = q
            for index, each in enumerate(placed):
                self._memory.kv[0, it.layer, each.position, each.row, dims] = k[index]
                self._memory.kv[1, it.layer, each.position, each.row, dims] = v[index]

        return write

    def fc2(self, worker: Worker, it: Instruction, _step: int, _event: int) -> Write:
        chunk = self._sizes.chunk
        inputs = slice(it.chunk * chunk, (it.chunk + it.num_chunks) * chunk)
        weight = self._map(it).weight[self._block_rows(it), inputs]
        sums = self._memory.act[: len(worker.placed), inputs] @ weight.T
        worker.sums = sums if it.chunk == 0 else worker.sums + sums
        return nothing

    def attend(self, worker: Worker, it: Instruction, _step: int, event: int) -> Write:
        """The worker's quarter of every token's pages; of its row's positions of this step what QKV
        wrote.
        """
        memory, count = self._memory, len(worker.placed)
        earlier = worker.copies.pop(event, None)
        parts = [self._part(worker, it, index, earlier) for index in range(count)]

        def write() -> None:
            for index, (out, ends) in enumerate(parts):
                memory.part[index, worker.number] = out
                memory.ends[index, worker.number] = ends

        return write

    def _part(
        self, worker: Worker, it: Instruction, index: int, earlier: Floats | None
    ) -> tuple[Floats, tuple[float, float]]:
        """A token's softmax over a quarter of its positions."""
        memory, length, at = self._memory, self._cache.length, worker.placed[index]
        quarter, head = worker.number % SPLITS, worker.number // SPLITS
        span = slice(*own_head(worker))
        fresh = memory.kv[:, it.layer, at.first : at.position + 1, at.row, span]
        cached = np.stack(
            [each[it.layer, :, at.row, head] for each in (self._cache.keys, self._cache.values)]
        )
        copied = [] if earlier is None else [earlier[:, : at.first, at.row]]
        both = np.concatenate([cached, *copied, fresh], axis=1)
        own = [p for p in range(length + at.position + 1) if p // PAGE % SPLITS == quarter]
        keys, values = both[:, own]
        scores = keys @ memory.q[index, span] / HEAD_DIM**0.5
        top = scores.max(initial=-np.inf)
        shares = np.exp(scores - (0.0 if np.isinf(top) else top))
        return shares @ values, (top, float(shares.sum()))

    def merge(self, worker: Worker, _it: Instruction, _step: int, _event: int) -> Write:
        """Every fourth token's head, of its quarters."""
        memory = self._memory
        own = range(worker.number % SPLITS, len(worker.placed), SPLITS)
        first = worker.number // SPLITS * SPLITS
        quarters = slice(first, first + SPLITS)
        top, total = np.moveaxis(memory.ends[own, quarters], -1, 0)
        shares = np.exp(top - top.max(-1, keepdims=True))
        merged = (shares[..., None] * memory.part[own, quarters]).sum(1)
        heads = merged / (shares * total).sum(-1)[:, None]

        def write() -> None:
            memory.heads[own, slice(*own_head(worker))] = heads

        return write

    def out(self, worker: Worker, it: Instruction, step: int, _event: int) -> Write:
        memory, rows = self._memory, self._block_rows(it)
        count = len(worker.placed)
        heads = memory.heads[:count]
        layer = self._weights.layers[it.layer].maps
        proj = layer[Matrix.PROJ]
        bias = proj.bias[rows] + layer[Matrix.FC2].bias[rows]
        x = self.source(worker, it)[:, rows] + worker.sums + heads @ proj.weight[rows].T + bias

        def write() -> None:
            memory.x[it.dst][:count, rows] = x
            memory.trace[step, it.layer][:count, rows] = x

        return write


def _turn(x: Floats, cosine: Floats, sine: Floats) -> Floats:
    low, high = x[:, :8], x[:, 8:]
    return np.concatenate([low * cosine - high * sine, low * sine + high * cosine], axis=1)
