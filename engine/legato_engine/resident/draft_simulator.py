"""What the instructions of drafts do, for `simulator`: how rows' tokens are placed and settled.

A row feeds its newest token and its draft tokens at the positions after it. Which tokens are
drafted is the caller's choice; the kernel looks them up, by functions that the kernels around
captured steps share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from legato_engine.resident.instructions import Instruction

Propose = Callable[[int, Sequence[int]], Sequence[int]]
"""Draft tokens of a row after what it has, its first token included."""
_Write = Callable[[], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """A token of a step: its row, its id, its position and the first one that its row writes in the
    step, both counted from the launch's first.
    """

    row: int
    token: int
    position: int
    first: int


def one_each(tokens: Sequence[int], step: int) -> list[Placed]:
    """A step without drafts."""
    return [Placed(row, token, step, step) for row, token in enumerate(tokens)]


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
        self.proposal = [list(drafts.propose(row, each)) for row, each in enumerate(self.history)]
        self.settled: list[list[int] | None] = [None] * len(tokens)
        self.placed = self._placed()
        self.follows = True
        self.told: list[list[list[int]]] = []

    def settle(
        self, it: Instruction, workers: int, placed: list[Placed], sampled: list[int]
    ) -> _Write:
        """What was sampled up to and including the first token that was not drafted."""
        rows = range(it.block, it.block + it.num_blocks * workers, workers)
        kept = {row: _kept(row, placed, sampled) for row in rows if row < len(self.history)}
        said = {
            row: list(self._drafts.propose(row, [*self.history[row], *tokens]))
            for row, tokens in kept.items()
        }

        def write() -> None:
            for row, tokens in kept.items():
                self.history[row] += tokens
                self.proposal[row], self.settled[row] = said[row], tokens

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
                placed.append(Placed(row, token, first + index, first))
        return placed


def _kept(row: int, placed: list[Placed], sampled: list[int]) -> list[int]:
    own = [index for index, each in enumerate(placed) if each.row == row]
    kept = []
    for index in own:
        kept.append(sampled[index])
        follows = index + 1 < len(placed) and placed[index + 1].row == row
        if not follows or placed[index + 1].token != sampled[index]:
            break
    return kept
