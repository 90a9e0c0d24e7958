"""What the workers of a simulated program share and hold, and how an instruction reads it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np

from legato_engine.resident.draft_simulator import DraftMemory, Drafts, Placed
from legato_engine.resident.draws import NOTHING_WEIGHED
from legato_engine.resident.instructions import Instruction, Op, Source
from legato_engine.resident.maps import Floats, Map
from legato_engine.resident.program import Program
from legato_engine.resident.sizes import BLOCK, HEAD_DIM, SPLITS, ModelSizes
from legato_engine.resident.stream import MATRICES
from legato_engine.resident.value_simulator import ValueMemory
from legato_engine.resident.weights import EPSILON, Weights

Write = Callable[[], None]
"""What is left to do of an instruction that has read and computed."""


class Memory:
    """What workers share; B tokens of a step, which are rows without drafts."""

    def __init__(
        self, program: Program, tokens: list[int], steps: int, drafts: Drafts | None
    ) -> None:
        sizes, most = program.sizes, 1 + (0 if drafts is None else drafts.most)
        rows = len(tokens) * most
        nan, num = np.nan, sizes.num_workers
        self.counters = [0] * program.num_counters
        self.x = np.full((2, rows, sizes.dim), nan)
        self.act = np.full((rows, sizes.ff_dim), nan)
        self.q = np.full((rows, sizes.dim), nan)
        self.part = np.full((rows, num, HEAD_DIM), nan)
        self.ends = np.full((rows, num, 2), nan)
        self.heads = np.full((rows, sizes.dim), nan)
        self.best = np.full((num, rows), nan)
        self.best_id = np.zeros((num, rows), np.int64)
        positions = steps * most
        self.kv = np.full((2, sizes.num_layers, positions, len(tokens), sizes.dim), nan)
        self.trace = np.full((steps, sizes.num_layers, rows, sizes.dim), nan)
        self.weighed = [[NOTHING_WEIGHED] * rows for _ in range(num)]
        self.logits = np.full((rows, sizes.vocab_size), nan)
        self.token = [-1] * rows
        self.stop: bool | None = None
        self.wish = False  # the host's
        self.published: list[list[int]] = []
        self.best_logits = np.full((steps, rows), nan)
        self.values = None if sizes.values is None else ValueMemory(sizes.values, rows)
        self.drafts = None if drafts is None else DraftMemory(drafts, tokens)


@dataclasses.dataclass(slots=True)
class Worker:
    """What a worker holds itself."""

    number: int
    placed: list[Placed]
    held: Floats
    sums: Floats
    copies: dict[int, Floats]  # keys and values of earlier steps, by the event that takes them
    ended: bool = False

    @property
    def token(self) -> list[int]:
        return [each.token for each in self.placed]


class Work:
    """What instructions do, by methods that read and compute, and return what is left to write."""

    def __init__(
        self, sizes: ModelSizes, weights: Weights, memory: Memory, chance: random.Random
    ) -> None:
        self._sizes, self._weights, self._memory, self._chance = sizes, weights, memory, chance

    def source(self, worker: Worker, it: Instruction) -> Floats:
        """The residual stream [B, D] that an instruction reads."""
        if it.src == Source.EMBED:
            embedded: Floats = self._weights.embedding[worker.token]
            return embedded
        stream: Floats = self._memory.x[it.src][: len(worker.placed)]
        return stream

    def _project(self, worker: Worker, it: Instruction, rows: list[int]) -> Floats:
        """Rows of a map of the norm, whose scale is in the weights: as the device computes it."""
        layer, whole = self._weights.layers[it.layer], self._map(it)
        # Kept by the worker, or read again.
        x = worker.held if self._chance.random() < 0.5 else self.source(worker, it)
        weight = whole.weight[rows]
        scaled = weight * layer.norm[0]
        mean = worker.held.mean(-1, keepdims=True)
        squares = (worker.held**2).mean(-1, keepdims=True)
        deviation = np.sqrt(squares - mean * mean + EPSILON)
        bias = weight @ layer.norm[1] + whole.bias[rows]
        out: Floats = (x @ scaled.T - mean * scaled.sum(-1)) / deviation + bias
        return out

    def _map(self, it: Instruction) -> Map:
        return self._weights.layers[it.layer].maps[MATRICES[Op(it.op)]]

    def _block_rows(self, it: Instruction) -> list[int]:
        num = self._sizes.num_workers
        firsts = ((it.block + i * num) * BLOCK for i in range(it.num_blocks))
        return [row for first in firsts for row in range(first, first + BLOCK)]


def own_head(worker: Worker) -> tuple[int, int]:
    first = worker.number // SPLITS * HEAD_DIM
    return first, first + HEAD_DIM


def nothing() -> None:
    """What an instruction leaves that writes only what its worker holds."""
