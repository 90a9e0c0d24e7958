"""Eviction order for KV pages, shared by cached prefixes and running requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

Rank = tuple[int, float, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """A request that holds pages, or a cached prefix."""

    candidate_id: int
    priority: int
    ema_acceptance_rate: float
    last_used: int  # iteration


def eviction_rank(candidate: EvictionCandidate) -> Rank:
    """Order by priority, draft acceptance, last use, then id; the lowest is evicted first."""
    return (
        candidate.priority,
        candidate.ema_acceptance_rate,
        candidate.last_used,
        candidate.candidate_id,
    )


def eviction_order(candidates: Iterable[EvictionCandidate]) -> list[EvictionCandidate]:
    """Sort candidates by `eviction_rank`; a request whose pages are all borrowed is none."""
    return sorted(candidates, key=eviction_rank)
