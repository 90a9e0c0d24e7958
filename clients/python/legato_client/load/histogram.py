"""Many durations in little memory, with percentiles."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

_BITS = 7  # of a duration are kept: buckets are at most 1/64 wide, relative to where they lie
PERCENTILES = (50.0, 90.0, 99.0, 99.9)


class Histogram:
    """Counts of durations in seconds, in logarithmic buckets; percentiles err by 1.6% at most.

    The extremes and the sum are exact.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.count = 0
        self.total = 0.0
        self.maximum = 0.0
        self.minimum = math.inf

    def add(self, seconds: float) -> None:
        seconds = max(seconds, 0.0)
        self._counts[_bucket(seconds)] += 1
        self.count += 1
        self.total += seconds
        self.maximum = max(self.maximum, seconds)
        self.minimum = min(self.minimum, seconds)

    def merge(self, other: Histogram) -> None:
        self._counts.update(other._counts)
        self.count += other.count
        self.total += other.total
        self.maximum = max(self.maximum, other.maximum)
        self.minimum = min(self.minimum, other.minimum)

    @property
    def mean(self) -> float:
        """0 when nothing was counted."""
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """Seconds; 0 when nothing was counted."""
        rank = math.ceil(self.count * percent / 100)
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= rank:
                return min(max(_upper_edge(bucket), self.minimum), self.maximum)
        return self.maximum

    def summary_ms(self) -> Mapping[str, float]:
        figures = {f"p{percent:g}": self.percentile(percent) for percent in PERCENTILES}
        figures = {"mean": self.mean, **figures, "max": self.maximum}
        return {"count": self.count, **{name: s * 1e3 for name, s in figures.items()}}


def _bucket(seconds: float) -> int:
    """Nanoseconds without all but their first bits, packed as exponent and mantissa."""
    nanoseconds = int(seconds * 1e9)
    shift = max(nanoseconds.bit_length() - _BITS, 0)
    return (shift << _BITS) | (nanoseconds >> shift)


def _upper_edge(bucket: int) -> float:
    """Seconds."""
    shift, mantissa = bucket >> _BITS, bucket & ((1 << _BITS) - 1)
    return (((mantissa + 1) << shift) - 1) / 1e9 if shift else mantissa / 1e9
