"""How far a worker's producer may run ahead of its instructions."""

from __future__ import annotations

import bisect
import itertools

from legato_engine.resident.program import Program


class RunAhead:
    """For one worker: when the producer may begin to copy what an instruction takes from the ring.

    A stage is copied as soon as the stage that had its place is used up. Stages of keys and values
    are not counted, as their number varies: the fewer there are, the farther ahead the ring
    reaches. With drafts those of a step are copied once its worker has committed the step before,
    which says what its tokens are. That ends: until then the worker waits for stages before them
    alone, and its producer has begun all of these.
    """

    def __init__(self, program: Program, worker: int) -> None:
        stages = [it.num_stages for it in program.workers[worker]]
        self._ends = list(itertools.accumulate(stages))
        self._ring_stages = program.ring_stages
        self._knows = program.sizes.drafts

    def begin(self, index: int) -> int:
        """The event, of this worker's from the first step on, during which the copy may begin."""
        step, at = divmod(index, len(self._ends))
        known = step * len(self._ends) if self._knows else 0
        whole = self._ends[-1]
        freed = step * whole + (self._ends[at - 1] if at else 0) - self._ring_stages
        if freed < 0 or not whole:
            return known
        step, stage = divmod(freed, whole)
        return max(known, step * len(self._ends) + bisect.bisect_right(self._ends, stage))
