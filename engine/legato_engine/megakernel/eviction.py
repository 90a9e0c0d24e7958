"""Who gives up pages when they run out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """A request that holds pages: running, or done with its prompt kept for others."""

    request_id: int
    priority: int
    ema_acceptance_rate: float
    last_used: int  # iteration


def eviction_order(candidates: Iterable[EvictionCandidate]) -> list[EvictionCandidate]:
    """Who goes first: the least priority, then the worst speculator, then the longest unused.

    The request id settles what is left. Whose pages are all borrowed frees none and is no
    candidate: a page is never evicted while somebody borrows it.
    """
    return sorted(
        candidates,
        key=lambda each: (
            each.priority,
            each.ema_acceptance_rate,
            each.last_used,
            each.request_id,
        ),
    )
