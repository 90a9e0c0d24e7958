"""What the instructions between a step's layers and the next step do, in the simulator."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from legato_engine.resident.draft_simulator import Placed, one_each
from legato_engine.resident.draws import DrawnRow, choose, own_slice, weigh
from legato_engine.resident.instructions import Instruction
from legato_engine.resident.simulator_state import Memory, Work, Worker, Write, nothing
from legato_engine.resident.sizes import ModelSizes
from legato_engine.resident.values import PLAIN, Value
from legato_engine.resident.weights import Rule, Weights


class TokenWork(Work):
    """From the head to the tokens of the next step.

    `length`: positions before the launch; a rule for each row.
    """

    def __init__(
        self,
        sizes: ModelSizes,
        weights: Weights,
        memory: Memory,
        chance: random.Random,
        *,
        length: int,
        steps: int,
        rules: Sequence[Rule],
    ) -> None:
        super().__init__(sizes, weights, memory, chance)
        self._length, self._steps = length, steps
        self._rules = rules

    def head(self, worker: Worker, it: Instruction, _step: int, _event: int) -> Write:
        rows = np.array(self._block_rows(it))
        worker.held = self.source(worker, it).copy()
        logits = self._project(worker, it, rows.tolist())
        best = logits.argmax(-1)

        def write() -> None:
            count, highest = len(logits), np.take_along_axis(logits, best[:, None], 1)[:, 0]
            self._memory.logits[:count, rows] = logits
            self._memory.best[worker.number, :count] = highest
            self._memory.best_id[worker.number, :count] = rows[best]

        return write

    def listen(self, _worker: Worker, it: Instruction, _step: int, _event: int) -> Write:
        memory = self._memory

        def write() -> None:
            if it.num_blocks:
                memory.stop = memory.wish

        return write

    def weigh(self, worker: Worker, _it: Instruction, _step: int, _event: int) -> Write:
        memory, mine = self._memory, own_slice(self._sizes, worker.number)
        found = {}
        for index, at in enumerate(worker.placed):
            if self._rules[at.row].temperature > 0.0:
                found[index] = weigh(self._drawn(index, at), mine.start, memory.logits[index, mine])

        def write() -> None:
            for index, each in found.items():
                memory.weighed[worker.number][index] = each

        return write

    def sample(self, worker: Worker, it: Instruction, step: int, _event: int) -> Write:
        memory, num = self._memory, self._sizes.num_workers
        rows = range(it.block, it.block + it.num_blocks * num, num)
        placed = worker.placed
        chosen = {row: self._choose(row, placed[row]) for row in rows if row < len(placed)}

        def write() -> None:
            for row, (token, logit) in chosen.items():
                memory.token[row] = token
                memory.best_logits[step, row] = logit

        return write

    def _choose(self, index: int, at: Placed) -> tuple[int, float]:
        memory, rule = self._memory, self._rules[at.row]
        logit, token = max(zip(memory.best[:, index], -memory.best_id[:, index], strict=True))
        if rule.temperature == 0.0:
            return -int(token), logit
        weighed = [each[index] for each in memory.weighed]
        return choose(self._drawn(index, at), weighed, memory.logits[index]), logit

    def _drawn(self, index: int, at: Placed) -> DrawnRow:
        highest, position = self._memory.best[:, index].max(), self._length + at.position + 1
        return DrawnRow.of(highest, self._rules[at.row], position, self._sizes.vocab_size)

    def settle(self, worker: Worker, it: Instruction, _step: int, _event: int) -> Write:
        drafts = self._memory.drafts
        assert drafts is not None, "an instruction of rows that draft"
        tokens, values = list(self._memory.token), self._values()
        return drafts.settle(it, self._sizes.num_workers, worker.placed, tokens, values)

    def place(self, _worker: Worker, it: Instruction, step: int, _event: int) -> Write:
        drafts = self._memory.drafts
        assert drafts is not None, "an instruction of rows that draft"
        if not it.num_blocks:
            return nothing
        return drafts.place(step, self._steps, stop=bool(self._memory.stop))

    def commit(self, worker: Worker, _it: Instruction, step: int, _event: int) -> Write:
        memory = self._memory
        drafts, tokens, values = memory.drafts, list(memory.token), self._values()
        settled: list[list[int]] = []
        if drafts is not None:
            worker.placed, worker.ended = list(drafts.placed), not drafts.follows
            settled = [list(each or ()) for each in drafts.settled]
        else:
            worker.placed = one_each(tokens, values, step + 1)
            worker.ended = bool(memory.stop) or step + 1 == self._steps

        def write() -> None:
            if worker.number == 0:
                memory.published.append(tokens)
                if memory.values is not None:
                    memory.values.told.append(values)
                if drafts is not None:
                    drafts.told.append(settled)

        return write

    def _values(self) -> list[Value]:
        """Of the step's tokens."""
        memory = self._memory
        return list(memory.values.value) if memory.values else [PLAIN] * len(memory.token)

    def embed(self, worker: Worker, it: Instruction, _step: int, _event: int) -> Write:
        """The worker's own outputs; tokens and values are what it has committed."""
        rows, words, read = self._block_rows(it), self._weights.embedding, self._weights.values
        assert read is not None, "an instruction of models with values"
        x = np.stack([read.embed(words, each.token, each.value)[rows] for each in worker.placed])

        def write() -> None:
            self._memory.x[it.dst][: len(x), rows] = x

        return write
