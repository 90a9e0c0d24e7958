"""KV cache manager: pages, rows and adapter slots of sequences."""

from __future__ import annotations

import dataclasses

from legato_engine.ipc.messages import KVCacheStats
from legato_engine.kv_cache.pools import NO_ADAPTER, SCRATCH_PAGE, AdapterSlots, IdPool
from legato_engine.kv_cache.prefix_cache import PageOwnership, PrefixCache, check_ownership
from legato_engine.kv_cache.radix_tree import Match, RadixTree
from legato_engine.sequence import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillWork:
    """Prefix to compute, page to copy and adapter to write.

    Pieces of images up to `first_piece` were encoded earlier. An encode continues with
    `[first_piece, stop_piece)`; a prefill has `stop_piece` 0 and encodes what else it needs. Pieces
    are the crops of a prefix's image, or those of a `VisualPrompt`.
    """

    compute_pages: tuple[int, ...] = ()  # of a prefix (BOS and image) that is not cached
    copy_tail: tuple[int, int] | None = None  # source and destination page of a partial hit
    first_piece: int = 0
    stop_piece: int = 0
    write_adapter: bool = False


NO_PREFILL_WORK = PrefillWork()
"""Nothing to compute or copy: decodes and page-aligned cache hits."""


# ---------------------------------------------------------------- counters


@dataclasses.dataclass(slots=True)
class KVCacheCounters:
    """Counters of the KV cache since the start."""

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


# ---------------------------------------------------------------- manager


class KVCacheManager:
    """Allocator of pages, rows and adapter slots, which shares pages of equal content.

    A page is free, owned by the tree, or owned by one sequence; `check` asserts it. The tree gets
    pages when their content is known and enqueued: full pages of a prompt when its prefill is
    launched, those of the answer as they fill, a partial last page at release.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_rows: int,
        max_context: int | None = None,
        *,
        num_adapter_slots: int = 0,
    ) -> None:
        """Create an empty cache.

        `num_pages` includes the scratch page; `max_context` is the model's, in positions.
        """
        assert num_rows > 0, f"{num_rows} rows"
        self._pool = IdPool(range(SCRATCH_PAGE + 1, num_pages))
        assert self._pool.size, f"{num_pages} pages leave none beside the scratch page"
        self._tree = RadixTree(self._pool, page_size)
        self._prefix_cache = PrefixCache(self._tree, self._pool, page_size)
        self.rows = IdPool(range(num_rows))
        self.adapters = AdapterSlots(num_adapter_slots)
        self.page_size = page_size
        self._owned: dict[Sequence, PageOwnership] = {}
        self._counters = KVCacheCounters()
        capacity = self._pool.size * page_size
        self.max_length = capacity if max_context is None else min(capacity, max_context)

    # ------------------------------------------------------------ state

    @property
    def pages_available(self) -> int:
        """Return the pages that are free or held by the prefix cache only."""
        return self._pool.num_free + self._tree.idle_pages

    @property
    def pages_total(self) -> int:
        return self._pool.size

    @property
    def pages_used(self) -> int:
        """Return the pages of all sequences, including zombies; shared pages count once."""
        return self._pool.size - self.pages_available

    @property
    def prefix_pages(self) -> int:
        return self._tree.idle_pages

    def stats(self) -> KVCacheStats:
        counted = self._counters
        prompt = counted.found_positions + counted.computed_positions
        return KVCacheStats(
            free=self._pool.num_free,
            idle=self._tree.idle_pages,
            shared=self._tree.shared_pages,
            draft=sum(len(ownership.draft) for ownership in self._owned.values()),
            hit_rate=counted.found_positions / max(1, prompt),
            fragmentation_ratio=counted.rejected_pages / max(1, counted.draft_pages),
            preemptions=counted.preemptions,
            recomputed_tokens=counted.recomputed_positions,
            found_tokens=counted.found_positions,
            computed_tokens=counted.computed_positions,
        )

    # ------------------------------------------------------------ admission

    def can_ever_fit(self, sequence: Sequence) -> bool:
        """Return whether the sequence fits an empty pool and the model's context."""
        if sequence.max_length > self.max_length:
            return False
        copies = (
            sequence.prefix_key is not None and sequence.image_prefix_length % self.page_size > 0
        )
        return self._pages_for(sequence.max_length) + copies <= self._pool.size

    def can_admit(self, sequence: Sequence) -> bool:
        """Return whether `admit` would succeed and leave a page for each growing sequence.

        A sequence waits while another is about to compute its image prefix. After a refusal it is
        not matched again until more pages are available, because matching is slow.
        """
        if not self.rows.can_allocate() or self.lacks_adapter_slot(sequence):
            return False
        available = self.pages_available - self._num_growing()
        if available <= sequence.pages.free_pages_when_refused:
            return False
        match = self._prefix_cache.match(sequence)
        if match is not None and not match.node.ready:
            return False
        fits = self._fits(sequence, match, available) or (
            match is not None
            and self._fits(sequence, self._prefix_cache.without_copy(match), available)
        )
        if not fits:
            sequence.pages.free_pages_when_refused = available
        return fits

    def lacks_adapter_slot(self, sequence: Sequence) -> bool:
        """Return whether its adapter gets no slot until another sequence is released."""
        return bool(sequence.adapter.key) and not self.adapters.can_acquire(sequence.adapter.key)

    def has_image_prefix(self, sequence: Sequence) -> bool:
        return not sequence.image_prefix_length or self._prefix_cache.has_image_prefix(sequence)

    def admit(self, sequence: Sequence) -> PrefillWork:
        """Allocate a row, an adapter slot, and pages for the known tokens and the next."""
        assert sequence.row < 0, f"sequence {sequence.seq_id} is admitted twice"
        work = self._admit_pages(sequence)
        (sequence.row,) = self.rows.allocate(1)
        if not sequence.adapter.key:
            return work
        adapter = self.adapters.acquire(sequence.adapter.key)
        sequence.adapter.slot = adapter.slot
        return work if adapter.ready else dataclasses.replace(work, write_adapter=True)

    def _admit_pages(self, sequence: Sequence) -> PrefillWork:
        """Set `pages.ids` to full pages of the tree, then private ones.

        The first private page may begin with a copy of the tree's partial page.
        """
        ownership = PageOwnership()
        match = self._affordable_match(sequence)
        if match is not None:
            self._prefix_cache.acquire(ownership, match)
        self._tree.evict_until_free(self._missing_pages(sequence, match))
        if match is None and sequence.prefix_key is not None:
            self._prefix_cache.acquire(ownership, self._prefix_cache.add_root(sequence))
        shared = self._prefix_cache.full_pages(ownership.node)
        private = self._pool.allocate(self._first_pages(sequence) - len(shared))
        ownership.private.update(private)
        self._owned[sequence] = ownership
        pages = sequence.pages
        pages.free_pages_when_refused = 0
        pages.ids = shared + private
        pages.capacity = len(pages.ids) * self.page_size
        self._counters.count_admission(sequence, 0 if match is None else match.length)
        compute: tuple[int, ...] = ()
        if pages.cached_length == 0:
            image = ownership.node.pages if ownership.node is not None else ()
            compute = image or pages.ids[: self._pages_for(sequence.prefix_length)]
        source = ownership.source
        return PrefillWork(compute, None if source is None else (source.pages[-1], private[0]))

    def _affordable_match(self, sequence: Sequence) -> Match | None:
        match = self._prefix_cache.match(sequence)
        if match is None or self._fits(sequence, match, self.pages_available):
            return match
        return self._prefix_cache.without_copy(match)

    def mark_planned(self, sequence: Sequence) -> None:
        """Let sequences planned later, even for the same launch, use its image prefix."""
        self._prefix_cache.mark_planned(self._owned[sequence])

    def mark_launched(self, sequence: Sequence) -> None:
        """Let later launches read the pages and the adapter of a prefill that is enqueued."""
        self._prefix_cache.mark_launched(sequence, self._owned[sequence])
        if sequence.adapter.key:
            self.adapters.mark_ready(sequence.adapter.key)

    # ------------------------------------------------------------ growth

    def grow(self, sequence: Sequence) -> bool:
        """Extend the capacity by one page; return False if none is available."""
        ownership = self._owned[sequence]
        if ownership.draft:
            page = ownership.draft.pop(0)
        elif self.pages_available > 0 or self._prefix_cache.deduplicate(sequence, ownership):
            self._tree.evict_until_free(1)
            (page,) = self._pool.allocate(1)
            sequence.pages.ids += (page,)
        else:
            return False
        ownership.private.add(page)
        sequence.pages.capacity += self.page_size
        self._prefix_cache.publish(sequence, ownership)
        return True

    def reserve_draft(self, sequence: Sequence, length: int) -> bool:
        """Allocate draft pages for positions `[capacity, length)`, all or none.

        Cached pages are evicted, but each sequence that still grows keeps a page available.
        """
        missing = self._pages_for(length) - len(sequence.pages.ids)
        if missing <= 0:
            return True
        max_length = sequence.max_length
        assert length <= max_length, f"{length} positions of at most {max_length}"
        if missing + self._num_growing(excluding=sequence) > self.pages_available:
            return False
        self._tree.evict_until_free(missing)
        pages = self._pool.allocate(missing)
        self._owned[sequence].draft.extend(pages)
        sequence.pages.ids += pages
        self._counters.draft_pages += missing
        return True

    def commit_to(self, sequence: Sequence, length: int, *, reserved: int = 0) -> None:
        """Keep the draft pages of committed positions and free those of rejected ones.

        - `[0, length)`: committed
        - `[length, reserved)`: may be committed by launches in flight; the pages stay drafts
        - `[reserved, end)`: rejected; reserved again before they are planned

        Launches in flight may still write to freed pages: launches that reuse them come later.
        """
        pages = sequence.pages
        if length <= pages.capacity and reserved > (len(pages.ids) - 1) * self.page_size:
            return
        draft = self._owned[sequence].draft
        num_committed = len(pages.ids) - len(draft)
        num_accepted = max(0, self._pages_for(length) - num_committed)
        assert num_accepted <= len(draft), f"{length} positions exceed {len(pages.ids)} pages"
        for _ in range(num_accepted):
            self.grow(sequence)
        num_kept = max(num_committed + num_accepted, self._pages_for(reserved))
        rejected = pages.ids[num_kept:]
        if not rejected:
            return
        pages.num_staged = min(pages.num_staged, num_kept)
        pages.ids = pages.ids[:num_kept]
        del draft[len(draft) - len(rejected) :]
        self._pool.free(rejected)
        self._counters.rejected_pages += len(rejected)

    # ------------------------------------------------------------ release

    def would_free_pages(self, sequence: Sequence) -> bool:
        ownership = self._owned[sequence]
        if ownership.private:
            return True
        return ownership.node is not None and ownership.node.ref_count == 1

    def invalidate(self, sequence: Sequence, length: int = 0) -> None:
        """Remove positions `[length, end)` from lookup; their values may be wrong."""
        self._prefix_cache.invalidate(self._owned[sequence], length)

    def release(self, sequence: Sequence) -> None:
        """Release all resources; known content stays cached."""
        assert sequence.row >= 0, f"sequence {sequence.seq_id} holds nothing to release"
        self.commit_to(sequence, 0)
        ownership = self._owned.pop(sequence)
        self._prefix_cache.release(sequence, ownership)
        self._pool.free(ownership.private)
        sequence.pages.ids = ()
        sequence.pages.capacity = 0
        if sequence.adapter.key:
            self.adapters.release(sequence.adapter.key)
            sequence.adapter.slot = NO_ADAPTER
        self.rows.free((sequence.row,))
        sequence.row = -1

    def preempt(self, sequence: Sequence) -> None:
        self.release(sequence)
        self._counters.preemptions += 1
        sequence.pages.num_preemptions += 1

    def check(self) -> None:
        check_ownership(self._pool, self._tree, self._owned, self.page_size)

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def _first_pages(self, sequence: Sequence) -> int:
        """Return the pages for the known tokens and the next one."""
        return self._pages_for(min(sequence.length + 1, sequence.max_length))

    def _missing_pages(self, sequence: Sequence, match: Match | None) -> int:
        """Return the private pages to allocate, plus those of an uncached image prefix."""
        first = self._first_pages(sequence)
        if match is not None:
            return first - match.node.length // self.page_size
        if sequence.prefix_key is None:
            return first
        image = sequence.image_prefix_length
        return first - image // self.page_size + self._pages_for(image)

    def _fits(self, sequence: Sequence, match: Match | None, available: int) -> bool:
        """Return whether `available` pages suffice after `match` has acquired idle ones."""
        if match is not None:
            needed = {*match.node.path, match.source or match.node}
            available -= sum(len(node.pages) for node in needed if node.ref_count == 0)
        return self._missing_pages(sequence, match) <= available

    def _num_growing(self, excluding: Sequence | None = None) -> int:
        return sum(
            each.pages.capacity < each.max_length
            for each in self._owned
            if not each.finalized and each is not excluding
        )
