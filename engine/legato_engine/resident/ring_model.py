"""The ring of a thread block as its two producers and its warps use it, in random orders.

This is the specification of `Ring` in ring.cuh and of `acquire` in producer.cuh. A barrier tells
phases apart by their parity alone, a copy lands at any time after it was begun, and what a warp
reads reaches its registers at any time after it asked for it.

A stage of weights is every warp's. One of attention's is of those that have pages of it: they let
it go, for the others too, and these go past it without a look. So a warp may come to a stage whose
place is still a lap behind; it looks at the lap first. When attention ends all warps meet.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

from legato_engine.resident.sizes import PRODUCERS

_NOTHING = -1
_Moves = Iterator[bool]
"""What a thread does, move by move: whether it got on, or waits."""


Takers = tuple[int, ...]
"""The warps that have pages of a stage of attention's, the first page's first; (): all, weights."""
WEIGHTS: Takers = ()


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
    """Faults that can be planted: with `early` a warp lets a stage go when it has asked for its
    contents, before it has them; without `looks_at_lap` and `meets` it does not do that.
    `under_way` 0: any number of copies.
    """

    def __init__(
        self,
        ring_stages: int,
        under_way: int,
        *,
        warps: int = 2,
        early: bool = False,
        looks_at_lap: bool = True,
        meets: bool = True,
    ) -> None:
        self._stages, self._under_way, self._warps = ring_stages, under_way, warps
        self._early, self._looks_at_lap, self._meets = early, looks_at_lap, meets
        self._full = [_Barrier(1) for _ in range(ring_stages)]
        self._empty = [_Barrier(warps) for _ in range(ring_stages)]
        self._begun = [0] * ring_stages
        self._content = [_NOTHING] * ring_stages
        self._landing: list[int] = []
        self._met = _Barrier(warps)

    def run(self, plan: Sequence[Takers], chance: random.Random) -> None:
        """Move a stage for each entry of `plan` through the ring in one random order.

        Raises:
            RingFault: the protocol fails in this order.
        """
        threads = [self._produce(number, len(plan)) for number in range(PRODUCERS)]
        threads += [self._consume(warp, plan) for warp in range(self._warps)]
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
            self._begun[slot] = stage // self._stages + 1
            yield True

    def _consume(self, warp: int, plan: Sequence[Takers]) -> _Moves:
        meetings, in_attention = 0, False
        for stage, takers in enumerate(plan):
            lap, slot = divmod(stage, self._stages)
            if self._meets and in_attention and takers == WEIGHTS:
                self._met.arrive()
                while self._met.completed == meetings:
                    yield False
                meetings += 1
            in_attention = takers != WEIGHTS
            if in_attention and warp not in takers:
                continue
            while in_attention and self._looks_at_lap and self._begun[slot] != lap + 1:
                yield False
            while not self._full[slot].passed(lap):
                yield False
            yield True
            arrivals = self._warps - len(takers) + 1 if takers and takers[0] == warp else 1
            if self._early:
                self._let_go(slot, arrivals)
                yield True
            if self._content[slot] != stage:
                raise RingFault(f"reads {self._content[slot]} in place of stage {stage}")
            if not self._early:
                self._let_go(slot, arrivals)
            yield True

    def _let_go(self, slot: int, arrivals: int) -> None:
        for _ in range(arrivals):
            self._empty[slot].arrive()
