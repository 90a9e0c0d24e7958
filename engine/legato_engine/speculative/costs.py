"""Costs of a step, in seconds."""

from __future__ import annotations

import bisect
import dataclasses
import operator

_COUNT = operator.itemgetter(0)


@dataclasses.dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds of one step by the number of positions in its forward.

    `steps` are measured (positions, seconds), interpolated linearly and extrapolated from the last
    two. `prefill` is the cost of one prompt position, `propose` that of one more token in the
    longest block, because a proposer drafts one token at a time for all rows.
    """

    steps: tuple[tuple[int, float], ...]
    prefill: float
    propose: float = 0.0

    def step(self, positions: int) -> float:
        if positions == 0:
            return 0.0
        right = bisect.bisect_left(self.steps, positions, key=_COUNT)
        right = min(max(right, 1), len(self.steps) - 1)
        (x0, y0), (x1, y1) = self.steps[right - 1], self.steps[right]
        if positions <= x0 and right == 1:
            return y0
        return y0 + (y1 - y0) * (positions - x0) / (x1 - x0)


NO_COSTS = CostTable(steps=((1, 1.0), (2, 2.0)), prefill=0.0)
"""Before any step is timed."""

H200_MOONDREAM2 = CostTable(
    steps=((8, 0.842e-3), (32, 1.05e-3), (64, 1.6e-3), (256, 4.0e-3)), prefill=6e-6
)
"""Steps of Moondream 2's decoder at a context of 850.

Measured up to 8 positions (benchmarks/results/h200), which cost what one does; estimated above.
"""
