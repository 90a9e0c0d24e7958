"""Counters of the KV cache."""

from __future__ import annotations

import dataclasses

from legato_engine.ipc.figures import KVCacheStats
from legato_engine.sequence import Sequence


@dataclasses.dataclass(slots=True)
class KVCacheCounters:
    """Counters since the start."""

    found_positions: int = 0  # by first admissions
    computed_positions: int = 0  # for first admissions
    recomputed_positions: int = 0  # after preemptions
    draft_pages: int = 0
    rejected_pages: int = 0
    preemptions: int = 0

    def count_admission(self, sequence: Sequence, num_found: int) -> None:
        sequence.pages.cached_length = num_found
        if sequence.pages.num_preemptions:
            self.recomputed_positions += sequence.length - num_found
            return
        sequence.pages.cached_tokens = num_found
        self.found_positions += num_found
        self.computed_positions += sequence.length - num_found

    def count_preemption(self, sequence: Sequence) -> None:
        self.preemptions += 1
        sequence.pages.num_preemptions += 1

    def stats(self, *, free: int, idle: int, shared: int, draft: int) -> KVCacheStats:
        prompt = self.found_positions + self.computed_positions
        return KVCacheStats(
            free=free,
            idle=idle,
            shared=shared,
            draft=draft,
            hit_rate=self.found_positions / prompt if prompt else 0.0,
            fragmentation_ratio=self.rejected_pages / self.draft_pages if self.draft_pages else 0.0,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed_positions,
            found_tokens=self.found_positions,
            computed_tokens=self.computed_positions,
        )
