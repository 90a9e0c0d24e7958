"""The ring of a thread block as its two producers and its warps use it, in random orders.

This is the specification of `Ring` in worker.cuh and of `acquire` in producer.cuh. A barrier tells
phases apart by their parity alone, a copy lands at any time after it was begun, and what a warp
reads reaches its registers at any time after it asked for it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from legato_engine.resident.sizes import PRODUCERS

_NOTHING = -1
_Moves = Iterator[bool]
"""What a thread does, move by move: whether it got on, or waits."""


class RingFault(Exception):
    """A warp that reads what is not its stage, or threads that all wait."""


def ring_problem(ring_stages: int, under_way: int) -> str | None:
    """Why a ring must not have these sizes, in words, or None.

    A producer waits for the stage `under_way` before its own to land. If the other one may fill
    that stage's place again meanwhile, the phase looks like the one before, and the wait never
    ends. A producer is fewer than `ring_stages` ahead of the other, and fewer than `under_way` if
    each waits for the other's stages.
    """
    if under_way < 1 or ring_stages < 2 * under_way:
        return f"{ring_stages} stages with {under_way} under way"
    if under_way % PRODUCERS == 0 and ring_stages % PRODUCERS:
        return (
            f"{ring_stages} stages change producers, and none waits for the other with {under_way}"
        )
    return None


@dataclasses.dataclass(slots=True)
class _Barrier:
    arrivals: int
    completed: int = 0
    arrived: int = 0

    def arrive(self) -> None:
        self.arrived += 1
        if self.arrived == self.arrivals:
            self.arrived, self.completed = 0, self.completed + 1

    def passed(self, lap: int) -> bool:
        """What a wait for the phase of `lap` sees: that the current one has another parity."""
        return self.completed % 2 != lap % 2


class RingModel:
    """`under_way` 0: any number of copies. With `early` a warp lets a stage go when it has asked
    for its contents, before it has them.
    """

    def __init__(
        self, ring_stages: int, under_way: int, *, warps: int = 2, early: bool = False
    ) -> None:
        self._stages, self._under_way, self._warps, self._early = (
            ring_stages,
            under_way,
            warps,
            early,
        )
        self._full = [_Barrier(1) for _ in range(ring_stages)]
        self._empty = [_Barrier(warps) for _ in range(ring_stages)]
        self._content = [_NOTHING] * ring_stages
        self._landing: list[int] = []

    def run(self, stages: int, chance: random.Random) -> None:
        """Move `stages` stages through the ring in one random order.

        Raises:
            RingFault: the protocol fails in this order.
        """
        threads = [self._produce(number, stages) for number in range(PRODUCERS)]
        threads += [self._consume(stages) for _ in range(self._warps)]
        waiting: set[int] = set()
        alive = set(range(len(threads)))
        favourite, favour = 0, 0.5
        while alive:
            if self._landing and chance.random() < 0.3:
                self._land(chance)
                waiting.clear()
                continue
            if len(waiting) == len(alive):
                if not self._landing:
                    raise RingFault(f"threads {sorted(alive)} wait for ever")
                self._land(chance)
                waiting.clear()
                continue
            if chance.random() < 0.02:
                favourite, favour = chance.randrange(len(threads)), chance.random()
            ready = sorted(alive - waiting)
            is_first = favourite in ready and chance.random() < favour
            number = favourite if is_first else chance.choice(ready)
            try:
                if next(threads[number]):
                    waiting.clear()
                else:
                    waiting.add(number)
            except StopIteration:
                alive.discard(number)
                waiting.clear()

    def _land(self, chance: random.Random) -> None:
        stage = self._landing.pop(chance.randrange(len(self._landing)))
        self._content[stage % self._stages] = stage
        self._full[stage % self._stages].arrive()

    def _produce(self, number: int, stages: int) -> _Moves:
        for stage in range(number, stages, PRODUCERS):
            lap, slot = divmod(stage, self._stages)
            while not self._empty[slot].passed(lap + 1):
                yield False
            yield True
            before = stage - self._under_way
            if self._under_way and before >= 0:
                lap, at = divmod(before, self._stages)
                while not self._full[at].passed(lap):
                    yield False
            self._content[slot] = _NOTHING
            self._landing.append(stage)
            yield True

    def _consume(self, stages: int) -> _Moves:
        for stage in range(stages):
            lap, slot = divmod(stage, self._stages)
            while not self._full[slot].passed(lap):
                yield False
            yield True
            if self._early:
                self._empty[slot].arrive()
                yield True
            if self._content[slot] != stage:
                raise RingFault(f"reads {self._content[slot]} in place of stage {stage}")
            if not self._early:
                self._empty[slot].arrive()
            yield True
