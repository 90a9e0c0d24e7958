"""Eviction order for KV pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

UNKNOWN_RATE = 0.8
"""Of requests that verified no draft tokens: what the block policies begin with."""

Rank = tuple[int, float, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """A request that holds pages, or a cached prefix."""

    candidate_id: int
    priority: int
    ema_acceptance_rate: float
    last_used: int  # iteration


def eviction_rank(candidate: EvictionCandidate) -> Rank:
    """The lowest is evicted first."""
    return (
        candidate.priority,
        candidate.ema_acceptance_rate,
        candidate.last_used,
        candidate.candidate_id,
    )


def eviction_order(candidates: Iterable[EvictionCandidate]) -> list[EvictionCandidate]:
    """Sort by rank; a request whose pages are all borrowed is no candidate."""
    return sorted(candidates, key=eviction_rank)
