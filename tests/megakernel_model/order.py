"""Happens-before order of instructions, and the ring of weight stages.

Workers run their lists in order; only counters order instructions of different workers. A wait for
n signals orders a signal before it if fewer than n could have come without that signal: if the
other signals that do not follow the wait themselves are too few. Each such order may show that
more signals follow a wait, so this is repeated until nothing is added.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from legato_engine.kernels.megakernel.program import NONE, Program
from legato_engine.kernels.megakernel.sizes import LOADERS

Ints = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """An instruction of a step; `index` counts a worker's events from the first step on."""

    worker: int
    index: int


class Stuck(Exception):
    """An execution that does not end; the text says which worker waits for which counter."""


def run_events(program: Program, steps: int) -> list[Event]:
    """Return the events of `steps` steps in an order in which they can run.

    Counters only grow, so that what can run in one order can run in all.

    Raises:
        Stuck: some wait never ends.
    """
    counters = [0] * program.num_counters
    lengths = [len(instructions) * steps for instructions in program.workers]
    at = [0] * len(lengths)
    blocked: dict[int, list[int]] = {}
    ready = list(range(len(lengths)))
    events = []
    while ready:
        worker = ready.pop()
        instructions = program.workers[worker]
        while at[worker] < lengths[worker]:
            step, index = divmod(at[worker], len(instructions))
            it = instructions[index]
            if it.wait != NONE and counters[it.wait] < it.wait_count + step * it.wait_stride:
                blocked.setdefault(it.wait, []).append(worker)
                break
            events.append(Event(worker, at[worker]))
            at[worker] += 1
            if it.signal != NONE:
                counters[it.signal] += 1
                ready += blocked.pop(it.signal, [])
    stuck = [worker for worker, length in enumerate(lengths) if at[worker] < length]
    if stuck:
        worker = min(stuck, key=lambda each: at[each])  # the others wait for what it would do
        step, index = divmod(at[worker], len(program.workers[worker]))
        it = program.workers[worker][index]
        want = it.wait_count + step * it.wait_stride
        raise Stuck(
            f"worker {worker} waits at instruction {index} of step {step} for {want} signals "
            f"of counter {it.wait}, which gets {counters[it.wait]}"
        )
    return events


@dataclasses.dataclass(slots=True)
class _Wait:
    """`implied`: how many signals of each worker are over when the wait is."""

    event: Event
    counter: int
    target: int
    implied: Ints
    settled: bool = False


class Order:
    """Events known to be over when an event begins.

    `over[worker][index]` is the number of events of each worker.
    """

    def __init__(self, program: Program, steps: int) -> None:
        """Raises `Stuck` as `run_events` does."""
        self.events = run_events(program, steps)
        self._program, self._steps = program, steps
        self._num = len(program.workers)
        length = max(len(instructions) for instructions in program.workers) * steps
        self.over: Ints = np.zeros((self._num, length, self._num), np.int32)
        self._signals = self._find_signals()
        self._waits = self._find_waits()
        while self._imply():
            self._propagate()

    def before(self, event: Event) -> Ints:
        """Return how many events of each worker are over when this one begins."""
        before: Ints = self.over[event.worker, event.index]
        return before

    def _find_signals(self) -> dict[int, Ints]:
        """Return every worker's events that signal each counter, padded with a number too high."""
        found: dict[int, list[list[int]]] = {}
        for worker, instructions in enumerate(self._program.workers):
            for step in range(self._steps):
                for index, it in enumerate(instructions):
                    if it.signal != NONE:
                        rows = found.setdefault(it.signal, [[] for _ in range(self._num)])
                        rows[worker].append(step * len(instructions) + index)
        signals = {}
        for which, rows in found.items():
            padded = np.full((self._num, max(map(len, rows))), np.iinfo(np.int32).max, np.int32)
            for worker, row in enumerate(rows):
                padded[worker, : len(row)] = row
            signals[which] = padded
        return signals

    def _find_waits(self) -> dict[Event, _Wait]:
        waits = {}
        for event in self.events:
            instructions = self._program.workers[event.worker]
            step, index = divmod(event.index, len(instructions))
            it = instructions[index]
            target = it.wait_count + step * it.wait_stride
            if it.wait != NONE and target > 0:
                none = np.zeros(self._num, np.int32)
                waits[event] = _Wait(event, it.wait, target, none)
        return waits

    def _imply(self) -> bool:
        """Bring every wait's implied signals up to date; whether any was added."""
        added = False
        for wait in self._waits.values():
            if wait.settled:
                continue
            worker, index = wait.event.worker, wait.event.index
            # Events of each worker that do not begin after this one is over.
            possible = (self.over[:, :, worker] <= index).sum(1)
            possible[worker] = index
            count = (self._signals[wait.counter] < possible[:, None]).sum(1)
            slack = int(count.sum()) - wait.target
            implied = np.maximum(count - slack, 0)
            wait.settled = slack == 0
            if (implied > wait.implied).any():
                wait.implied, added = implied, True
        return added

    def _propagate(self) -> None:
        """Compute `over` of the implied signals."""
        for event in self.events:
            worker, index = event.worker, event.index
            over = self.over[worker, index]
            if index:
                np.maximum(over, self.over[worker, index - 1], out=over)
            wait = self._waits.get(event)
            if wait is not None:
                (workers,) = wait.implied.nonzero()
                if len(workers):
                    signals = self._signals[wait.counter]
                    ends = signals[workers, wait.implied[workers] - 1]
                    np.maximum(over, self.over[workers, ends].max(0), out=over)
                    over[workers] = np.maximum(over[workers], ends + 1)
            over[worker] = index


# ---------------------------------------------------------------- ring

# How far a worker's loader may run ahead of its instructions.


class RunAhead:
    """Earliest moments at which a worker's loader may copy an instruction's stages.

    A stage is copied as soon as the stage that had its place is used up. Stages of keys and values
    are not counted, as their number varies: the fewer there are, the farther ahead the ring
    reaches. With drafts those of a step are copied once its worker has committed the step before,
    which says what its tokens are. That ends: until then the worker waits for stages before them
    alone, and its loader has begun all of these.
    """

    def __init__(self, program: Program, worker: int) -> None:
        stages = [it.num_stages for it in program.workers[worker]]
        self._ends = list(itertools.accumulate(stages))
        self._ring_stages = program.ring_stages
        self._knows = program.sizes.drafts

    def begin(self, index: int) -> int:
        """Return the worker's event during which the copy may begin, from the first step on."""
        step, at = divmod(index, len(self._ends))
        known = step * len(self._ends) if self._knows else 0
        whole = self._ends[-1]
        freed = step * whole + (self._ends[at - 1] if at else 0) - self._ring_stages
        if freed < 0 or not whole:
            return known
        step, stage = divmod(freed, whole)
        return max(known, step * len(self._ends) + bisect.bisect_right(self._ends, stage))


# ---------------------------------------------------------------- ring model

# The ring of a thread block as its two loaders and its warps use it, in random orders.
#
# This is the specification of `Ring` in ring.cuh and of `acquire` in loader.cuh. A barrier
# distinguishes phases by their parity alone, a copy lands at any time after it was begun, and a
# read reaches its warp's registers at any time after it was issued.
#
# All warps read a stage of weights. A stage of pages is read by the warps that have pages of it:
# they release it for the others too, which skip it without a poll. So a warp may come to a stage
# whose place is still a lap behind; it checks the lap first. When attention ends all warps meet.

_NOTHING = -1
_Moves = Iterator[bool]
"""What a thread does, move by move: whether it got on, or waits."""


Takers = tuple[int, ...]
"""The warps that have pages of a stage of attention's, the first page's first; (): all, weights."""
WEIGHTS: Takers = ()


class RingFault(Exception):
    """A warp reads another stage's contents, or all threads wait."""


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
        """Return whether a wait for the phase of `lap` sees a current phase of another parity."""
        return self.completed % 2 != lap % 2


class RingModel:
    """A ring in which faults can be planted.

    With `early` a warp releases a stage when it has asked for its contents, before it has them;
    without `looks_at_lap` and `meets` it does not do that. `under_way` 0: any number of copies.
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
        threads = [self._produce(number, len(plan)) for number in range(LOADERS)]
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
        for stage in range(number, stages, LOADERS):
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
