"""What a KV cache has found, computed and thrown away since its start."""

from __future__ import annotations

import dataclasses

from legato_engine.ipc.messages import KVCacheStats
from legato_engine.sequence import Sequence


@dataclasses.dataclass(slots=True)
class KVCacheCounters:
    """Counters of positions, of pages, and of preemptions."""

    found: int = 0  # positions of sequences admitted for the first time
    computed: int = 0  # positions likewise
    recomputed: int = 0  # positions of sequences that had been preempted
    drafted: int = 0  # pages
    discarded: int = 0  # pages of those drafted
    preemptions: int = 0

    def admitted(self, sequence: Sequence, num_found: int) -> None:
        """A sequence has pages, `num_found` positions of them computed already; it is told so."""
        sequence.pages.cached_length = num_found
        if sequence.pages.num_preemptions:
            self.recomputed += sequence.length - num_found
            return
        sequence.pages.cached_tokens = num_found
        self.found += num_found
        self.computed += sequence.length - num_found

    def preempted(self, sequence: Sequence) -> None:
        """A sequence gave its pages back and will be admitted again; it is told so."""
        self.preemptions += 1
        sequence.pages.num_preemptions += 1

    def report(self, *, free: int, idle: int, shared: int, draft: int) -> KVCacheStats:
        """The counters beside how many pages are free, idle, shared and drafts now."""
        prompt = self.found + self.computed
        return KVCacheStats(
            free=free,
            idle=idle,
            shared=shared,
            draft=draft,
            hit_rate=self.found / prompt if prompt else 0.0,
            fragmentation_ratio=self.discarded / self.drafted if self.drafted else 0.0,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed,
        )
