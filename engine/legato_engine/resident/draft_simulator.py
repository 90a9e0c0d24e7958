"""What the instructions of drafts do, for `simulator`: how rows' tokens are placed and settled.

A row feeds its newest token and its draft tokens at the positions after it. Which tokens are
drafted is the caller's choice; the kernel looks them up, by functions that the kernels around
captured steps share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from legato_engine.resident.instructions import Instruction
from legato_engine.resident.values import PLAIN, Value

Propose = Callable[[int, Sequence[int]], Sequence[int]]
"""Draft tokens of a row after what it has, its first token included."""
_Write = Callable[[], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """A token of a step: its row, its id, its position and the first one that its row writes in the
    step, both counted from the launch's first, and what it has of values.
    """

    row: int
    token: int
    position: int
    first: int
    value: Value = PLAIN


def one_each(tokens: Sequence[int], values: Sequence[Value], step: int) -> list[Placed]:
    """A step without drafts."""
    both = enumerate(zip(tokens, values, strict=True))
    return [Placed(row, token, step, step, value) for row, (token, value) in both]


@dataclasses.dataclass(frozen=True, slots=True)
class Drafts:
    """At most `most` draft tokens of a row; a launch ends when a row has `length` new tokens."""

    propose: Propose
    most: int
    length: int


class DraftMemory:
    """What workers share of drafts, and what the host was told: each row's tokens [S][B]."""

    def __init__(self, drafts: Drafts, tokens: Sequence[int]) -> None:
        self._drafts = drafts
        self.history = [[token] for token in tokens]
        self.value: list[Value] = [PLAIN] * len(tokens)  # of each row's newest token
        self.proposal = [list(drafts.propose(row, each)) for row, each in enumerate(self.history)]
        self.settled: list[list[int] | None] = [None] * len(tokens)
        self.placed = self._placed()
        self.follows = True
        self.told: list[list[list[int]]] = []

    def settle(
        self,
        it: Instruction,
        workers: int,
        placed: list[Placed],
        sampled: list[int],
        values: list[Value],
    ) -> _Write:
        """What was sampled up to and including the first token that was not drafted."""
        rows = range(it.block, it.block + it.num_blocks * workers, workers)
        kept = {row: _kept(row, placed, sampled) for row in rows if row < len(self.history)}
        tokens = {row: [sampled[index] for index in own] for row, own in kept.items()}
        newest = {row: values[own[-1]] for row, own in kept.items()}
        said = {
            row: list(self._drafts.propose(row, [*self.history[row], *own]))
            for row, own in tokens.items()
        }

        def write() -> None:
            for row, own in tokens.items():
                self.history[row] += own
                self.proposal[row], self.settled[row] = said[row], own
                self.value[row] = newest[row]

        return write

    def place(self, step: int, steps: int, *, stop: bool) -> _Write:
        """The next step's tokens, and whether it follows."""
        ended = any(len(each) > self._drafts.length for each in self.history)
        placed = self._placed()

        def write() -> None:
            self.placed, self.follows = placed, not (ended or stop or step + 1 == steps)

        return write

    def _placed(self) -> list[Placed]:
        placed = []
        for row, history in enumerate(self.history):
            first = len(history) - 1
            for index, token in enumerate([history[-1], *self.proposal[row][: self._drafts.most]]):
                value = PLAIN if index else self.value[row]
                placed.append(Placed(row, token, first + index, first, value))
        return placed


def _kept(row: int, placed: list[Placed], sampled: list[int]) -> list[int]:
    """Indices of the step's tokens."""
    own = [index for index, each in enumerate(placed) if each.row == row]
    kept = []
    for index in own:
        kept.append(index)
        follows = index + 1 < len(placed) and placed[index + 1].row == row
        if not follows or placed[index + 1].token != sampled[index]:
            break
    return kept
