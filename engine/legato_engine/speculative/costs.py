"""What an iteration costs, in seconds of a device that was measured."""

from __future__ import annotations

import bisect
import dataclasses
import operator

_COUNT = operator.itemgetter(0)


@dataclasses.dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds of one iteration, by the positions that its forward is fed.

    `steps` are (positions, seconds) measured on a device, linear between them and beyond the last
    two. `prefill` is the cost of one prompt position, `propose` that of one more token of the
    longest block: a draft speaks for all rows at once, one token after the other.
    """

    steps: tuple[tuple[int, float], ...]
    prefill: float
    propose: float = 0.0

    def step(self, positions: int) -> float:
        """Seconds of a forward over so many positions; 0 for none."""
        if positions == 0:
            return 0.0
        right = bisect.bisect_left(self.steps, positions, key=_COUNT)
        right = min(max(right, 1), len(self.steps) - 1)
        (x0, y0), (x1, y1) = self.steps[right - 1], self.steps[right]
        if positions <= x0 and right == 1:
            return y0
        return y0 + (y1 - y0) * (positions - x0) / (x1 - x0)


H200_MOONDREAM2 = CostTable(
    steps=((8, 0.842e-3), (32, 1.05e-3), (64, 1.6e-3), (256, 4.0e-3)), prefill=6e-6
)
"""Positions in one forward of Moondream 2's decoder at a context of 850.

Up to 8 positions cost what one does (measured, benchmarks/results/h200); what lies beyond is an
estimate until verification of several tokens a row has been measured.
"""
