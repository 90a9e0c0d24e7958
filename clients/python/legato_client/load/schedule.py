"""When requests are due: fixed beforehand, independent of any answer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

ARRIVALS = ("poisson", "constant")


def due_times(
    arrivals: str, rate: float, seconds: float, *, share: int = 0, shares: int = 1, seed: int = 0
) -> Iterator[float]:
    """Offsets in seconds from the start, ascending, below `seconds`, for one of `shares` senders.

    All senders together give `rate` requests a second: "constant" ones evenly spaced, "poisson"
    ones independent of each other, the same for the same seed.
    """
    times = (
        ((share + shares * index) / rate for index in itertools.count())
        if arrivals == "constant"
        else _poisson(rate / shares, random.Random(f"{seed}/{share}"))
    )
    return itertools.takewhile(lambda due: due < seconds, times)


def _poisson(rate: float, source: random.Random) -> Iterator[float]:
    """A Poisson process: its gaps are exponential."""
    due = 0.0
    while True:
        due += source.expovariate(rate)
        yield due
