"""How far a worker's producer may run ahead of its instructions."""

from __future__ import annotations

import bisect
import itertools

from legato_engine.resident.program import Program


class RunAhead:
    """For one worker: when the producer may begin to copy what an instruction takes from the ring.

    A stage is copied as soon as the stage that had its place is used up. Stages of keys and values
    are not counted, as their number varies: the fewer there are, the farther ahead the ring
    reaches.
    """

    def __init__(self, program: Program, worker: int) -> None:
        stages = [it.num_stages for it in program.workers[worker]]
        self._ends = list(itertools.accumulate(stages))
        self._ring_stages = program.ring_stages

    def begin(self, index: int) -> int:
        """The event, of this worker's from the first step on, during which the copy may begin."""
        step, at = divmod(index, len(self._ends))
        whole = self._ends[-1]
        freed = step * whole + (self._ends[at - 1] if at else 0) - self._ring_stages
        if freed < 0 or not whole:
            return 0
        step, stage = divmod(freed, whole)
        return step * len(self._ends) + bisect.bisect_right(self._ends, stage)
