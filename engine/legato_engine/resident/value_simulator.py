"""What the instructions of values do, for `simulator`: memory that begins as NaN, and no order.

Shape legend: B tokens of a step, which are rows without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from legato_engine.resident.instructions import Instruction
from legato_engine.resident.maps import Floats, gelu
from legato_engine.resident.sizes import BLOCK, ModelSizes, ValueDims
from legato_engine.resident.values import Value, Values

_Write = Callable[[], None]
_UNREAD = (np.nan,) * 4


class ValueMemory:
    """What workers share of values, and what the host was told [S][B]."""

    def __init__(self, dims: ValueDims, rows: int) -> None:
        self.act = np.full((rows, 2 * dims.inner_dim), np.nan)
        self.bins = np.full((rows, dims.scalar_bins + dims.pair_bins), np.nan)
        self.value: list[Value] = [_UNREAD] * rows
        self.told: list[list[Value]] = []


class ValueWork:
    """Reads and computes; each returns what is left to write."""

    def __init__(self, sizes: ModelSizes, values: Values, memory: ValueMemory) -> None:
        assert sizes.values is not None, "a model without values has none of these instructions"
        self._sizes, self._dims = sizes, sizes.values
        self._values, self._memory = values, memory
        # By worker: INNER's tokens.
        self._seen: list[list[int]] = [[] for _ in range(sizes.num_workers)]

    def inner(self, worker: int, it: Instruction, tokens: list[int], x: Floats) -> _Write:
        """The first layer of decoders that some token needs."""
        self._seen[worker] = list(tokens)
        inner, found = self._dims.inner_dim, {}
        for row in self._block_rows(it):
            kind = self._values.kinds[row // inner]
            if kind.token in tokens:
                one = kind.fc1.weight[row % inner], kind.fc1.bias[row % inner]
                found[row] = gelu(x @ one[0] + one[1])
        return lambda: self._store(self._memory.act, found)

    def bins(self, worker: int, it: Instruction) -> _Write:
        """The second layer of those."""
        first, inner, found = self._dims.scalar_bins, self._dims.inner_dim, {}
        for row in self._block_rows(it):
            is_pair = row >= first
            kind = self._values.kinds[is_pair]
            if kind.token in self._seen[worker]:
                seen = len(self._seen[worker])
                inputs = self._memory.act[:seen, is_pair * inner : (is_pair + 1) * inner]
                own = row - first if is_pair else row
                found[row] = inputs @ kind.fc2.weight[own] + kind.fc2.bias[own]
        return lambda: self._store(self._memory.bins, found)

    def read(self, worker: int, it: Instruction, logits: Floats) -> _Write:
        """The values of the worker's rows."""
        rows = range(it.block, it.block + it.num_blocks * self._sizes.num_workers)
        tokens, memory, first = self._seen[worker], self._memory, self._dims.scalar_bins
        values = {}
        for row in rows[:: self._sizes.num_workers]:
            if row >= len(tokens):
                continue
            bins = None
            if tokens[row] == self._values.scalar.token:
                bins = memory.bins[row, :first].copy()
            elif tokens[row] == self._values.pair.token:
                bins = memory.bins[row, first:].copy()
            values[row] = self._values.read(tokens[row], bins, logits[row])

        def write() -> None:
            for row, value in values.items():
                memory.value[row] = value

        return write

    def _store(self, to: Floats, found: dict[int, Floats]) -> None:
        for row, column in found.items():
            to[: len(column), row] = column

    def _block_rows(self, it: Instruction) -> Iterator[int]:
        for index in range(it.num_blocks):
            first = (it.block + index * self._sizes.num_workers) * BLOCK
            yield from range(first, first + BLOCK)
