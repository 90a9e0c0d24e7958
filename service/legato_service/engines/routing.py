"""The choice of an engine for a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_LEAD = 0.5
"""Of an engine's rows: by so many more requests it may be ahead of the least loaded engine and
still get requests for what it holds."""


class Candidate(NamedTuple):
    """An engine that serves.

    `wait` is the predicted one in seconds, `load` the requests that it has, in units of the rows
    that it runs at a time. `holds`: it has computed something that the request needs.
    """

    number: int
    wait: float = 0.0
    load: float = 0.0
    holds: bool = False
    is_full: bool = False  # its queue takes no more

    @property
    def score(self) -> float:
        """How long a request waits there, roughly: `load` counts what `wait` has not seen yet."""
        return self.wait + self.load


def choose(candidates: Sequence[Candidate], turn: int, recomputing: float) -> int:
    """Return the number of the engine where a request waits least.

    An engine that holds what the request needs is preferred, unless it lets the request wait
    longer than the `recomputing` takes elsewhere, in seconds, or leads by `MAX_LEAD`. Of equal
    engines `turn` decides.
    """
    least = _least(candidates, turn)
    holders = [
        each
        for each in candidates
        if each.holds
        and not each.is_full
        and each.wait <= least.wait + recomputing
        and each.load <= least.load + MAX_LEAD
    ]
    return (_least(holders, turn) if holders else least).number


def least_loaded(candidates: Sequence[Candidate], turn: int) -> int:
    """Return the number of the engine where a request waits least, whatever it holds."""
    return _least(candidates, turn).number


def _least(candidates: Sequence[Candidate], turn: int) -> Candidate:
    start = turn % len(candidates)
    return min((*candidates[start:], *candidates[:start]), key=lambda each: each.score)
