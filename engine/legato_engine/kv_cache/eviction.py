"""Who gives up pages when they run out: one rule, for what is kept and for who holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

Rank = tuple[int, float, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """Somebody who holds pages: a request, or what is kept of requests that are done."""

    candidate_id: int
    priority: int
    ema_acceptance_rate: float
    last_used: int  # iteration


def eviction_rank(candidate: EvictionCandidate) -> Rank:
    """The lowest goes first: the least priority, the worst speculator, the longest unused.

    The id settles what is left.
    """
    return (
        candidate.priority,
        candidate.ema_acceptance_rate,
        candidate.last_used,
        candidate.candidate_id,
    )


def eviction_order(candidates: Iterable[EvictionCandidate]) -> list[EvictionCandidate]:
    """Who goes first, by `eviction_rank`.

    Whose pages are all borrowed frees none and is no candidate: a page is never evicted while
    somebody borrows it.
    """
    return sorted(candidates, key=eviction_rank)
