"""Which instructions are over before others begin, in every execution of a program.

Workers run their lists in order; only counters order instructions of different workers. A wait for
n signals orders a signal before it if fewer than n could have come without that signal: if the
other signals that do not follow the wait themselves are too few. Each such order may show that
more signals follow a wait, so this is repeated until nothing is added.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from legato_engine.resident.instructions import NONE
from legato_engine.resident.program import Program

Ints = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """An instruction of a step; `index` counts a worker's events from the first step on."""

    worker: int
    index: int


class Stuck(Exception):
    """An execution that does not end; the text says which worker waits for which counter."""


def run_events(program: Program, steps: int) -> list[Event]:
    """The events of `steps` steps in an order in which they can run.

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
    """What is known to be over when an event begins: `over[worker][index]` is the number of events
    of each worker.
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
        """How many events of each worker are over when this one begins."""
        before: Ints = self.over[event.worker, event.index]
        return before

    def _find_signals(self) -> dict[int, Ints]:
        """Of each counter, every worker's events that signal it, padded with a number too high."""
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
