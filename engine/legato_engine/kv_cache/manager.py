"""Who holds which pages, which batch row and which adapter slot."""

from __future__ import annotations

import dataclasses

from legato_engine.ipc.messages import KVCacheStats
from legato_engine.kv_cache.adapter_slots import NO_ADAPTER, AdapterSlots
from legato_engine.kv_cache.counters import KVCacheCounters
from legato_engine.kv_cache.page_budget import PageBudget
from legato_engine.kv_cache.page_ownership import PageOwnership, check_ownership
from legato_engine.kv_cache.page_pool import PagePool
from legato_engine.kv_cache.prefill_work import PrefillWork
from legato_engine.kv_cache.prefix_cache import PrefixCache
from legato_engine.kv_cache.radix_tree import RadixTree
from legato_engine.kv_cache.slot_pool import SlotPool
from legato_engine.sequence import Sequence


class KVCacheManager:
    """Gives a sequence pages as it grows, shares what is equal, and takes back what it held.

    A page is free, or the tree's, or private to one sequence, or a draft of one sequence; `check`
    asserts it. The tree has the pages whose content is known and enqueued: a prompt's full pages
    from its launch on, an answer's as they fill, and at the end the last one, which may be partial.
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
        """`num_pages` counts the scratch page; `max_context` is the model's, in positions."""
        self._pool = PagePool(num_pages)
        self._tree = RadixTree(self._pool, page_size)
        self._budget = PageBudget(self._pool, self._tree, page_size)
        self._prefix_cache = PrefixCache(self._tree, self._pool, page_size)
        self._rows = SlotPool(num_rows)
        self._adapters = AdapterSlots(num_adapter_slots)
        self._page_size = page_size
        self._held: dict[Sequence, PageOwnership] = {}
        self._counters = KVCacheCounters()
        capacity = self._pool.num_usable * page_size
        self.max_length = capacity if max_context is None else min(capacity, max_context)

    # ------------------------------------------------------------ state

    @property
    def num_rows(self) -> int:
        """Rows in all: the largest batch."""
        return self._rows.num_slots

    @property
    def rows_free(self) -> int:
        """Rows that a new sequence could take."""
        return self._rows.num_free

    @property
    def rows_used(self) -> int:
        """Rows held by live sequences and zombies."""
        return self._rows.num_used

    @property
    def adapters_used(self) -> int:
        """Adapter slots held by live sequences and zombies."""
        return self._adapters.num_held

    @property
    def pages_total(self) -> int:
        """Pages in all, without the scratch page."""
        return self._pool.num_usable

    @property
    def pages_used(self) -> int:
        """Pages held by live sequences and zombies, what they share counted once."""
        return self._pool.num_usable - self._budget.num_pages

    @property
    def prefix_pages(self) -> int:
        """Pages kept for whoever comes with the same tokens; they are evicted when needed."""
        return self._tree.idle_pages

    def report(self) -> KVCacheStats:
        """The pool as it is, and its counters since the start."""
        return self._counters.report(
            free=self._pool.num_free,
            idle=self._tree.idle_pages,
            shared=self._tree.shared_pages,
            draft=sum(len(holding.draft) for holding in self._held.values()),
        )

    # ------------------------------------------------------------ admission

    def fits_ever(self, sequence: Sequence) -> bool:
        """Whether the sequence fits an empty pool and the context."""
        if sequence.max_length > self.max_length:
            return False
        tail = (
            sequence.prefix_key is not None and sequence.image_prefix_length % self._page_size > 0
        )
        return self._budget.pages_for(sequence.max_length) + tail <= self._pool.num_usable

    def can_admit(self, sequence: Sequence) -> bool:
        """Whether `admit` would succeed now, and leave a page for everybody who still grows.

        A sequence whose picture another one is about to compute waits: next time it is a hit. One
        that did not fit is looked at again when there is more room: to look takes long.
        """
        if not self._rows.can_allocate() or self.lacks_adapter_slot(sequence):
            return False
        available = self._budget.num_pages - self._num_growing()
        if available <= sequence.pages.refused_at:
            return False
        match = self._prefix_cache.match(sequence)
        if match is not None and not match.node.ready:
            return False
        fits = self._budget.fits(sequence, match, available) or (
            match is not None
            and self._budget.fits(sequence, self._prefix_cache.uncopied(match), available)
        )
        if not fits:
            sequence.pages.refused_at = available
        return fits

    def lacks_adapter_slot(self, sequence: Sequence) -> bool:
        """Whether its adapter has no slot now and can have none until a holder goes."""
        return bool(sequence.adapter.key) and not self._adapters.can_acquire(sequence.adapter.key)

    def finds_image_prefix(self, sequence: Sequence) -> bool:
        """Whether `admit` would find its picture, if it has one: its prefill computes none."""
        return not sequence.image_prefix_length or self._prefix_cache.knows_image_prefix(sequence)

    def admit(self, sequence: Sequence) -> PrefillWork:
        """Set `row`, `page_ids`, `adapter_slot` and what was found, having asked `can_admit`.

        The pages hold what is to be fed and, if there will be more, the token sampled from it.
        """
        assert sequence.row < 0, f"sequence {sequence.seq_id} is admitted twice"
        work = self._admit_pages(sequence)
        if not sequence.adapter.key:
            return work
        adapter = self._adapters.acquire(sequence.adapter.key)
        sequence.adapter.slot = adapter.slot
        return work if adapter.ready else dataclasses.replace(work, write_adapter=True)

    def _admit_pages(self, sequence: Sequence) -> PrefillWork:
        match, holding = self._prefix_cache.match(sequence), PageOwnership()
        if match is not None:
            fits = self._budget.fits(sequence, match, self._budget.num_pages)
            match = match if fits else self._prefix_cache.uncopied(match)
            self._prefix_cache.hold(holding, match)
        self._tree.make_room(self._budget.missing_pages(sequence, match))
        if match is None and sequence.prefix_key is not None:
            self._prefix_cache.hold(holding, self._prefix_cache.open(sequence))
        shared = () if holding.node is None else self._prefix_cache.full_pages(holding.node)
        private = self._pool.allocate(self._budget.first_pages(sequence) - len(shared))
        holding.private.update(private)
        self._held[sequence] = holding
        sequence.row = self._rows.allocate()
        sequence.pages.refused_at = 0
        sequence.pages.ids = shared + private
        sequence.pages.capacity = len(sequence.pages.ids) * self._page_size
        self._counters.admitted(sequence, 0 if match is None else match.length)
        compute: tuple[int, ...] = ()
        if sequence.pages.cached_length == 0:
            unit = holding.node.pages if holding.node is not None else ()
            compute = unit or sequence.pages.ids[: self._budget.pages_for(sequence.prefix_length)]
        source = holding.source
        return PrefillWork(compute, None if source is None else (source.pages[-1], private[0]))

    def planned(self, sequence: Sequence) -> None:
        """Its prefill is planned: those planned behind it, in the same launch too, may find its
        picture.
        """
        self._prefix_cache.planned(self._held[sequence])

    def launched(self, sequence: Sequence) -> None:
        """The launch that fills its pages is enqueued: those enqueued later may read them.

        So they may its adapter, which the same launch has written where it had to be.
        """
        self._prefix_cache.launched(sequence, self._held[sequence])
        if sequence.adapter.key:
            self._adapters.launched(sequence.adapter.key)

    # ------------------------------------------------------------ growth

    def grow(self, sequence: Sequence) -> bool:
        """One page more behind those it has; False when none is free or idle."""
        holding = self._held[sequence]
        if holding.draft:
            page = holding.draft.pop(0)
        elif self._budget.num_pages > 0 or self._prefix_cache.merge(sequence, holding):
            (page,) = self._budget.take(1)
            sequence.pages.ids += (page,)
        else:
            return False
        holding.private.add(page)
        sequence.pages.capacity += self._page_size
        self._prefix_cache.publish(sequence, holding)
        return True

    def reserve_draft(self, sequence: Sequence, length: int) -> bool:
        """Hold pages for `length` positions, those behind `capacity` as drafts; all or nothing.

        What is kept gives way to a proposal, what runs does not, nor the next page of anybody else
        who still grows. `length` is at most `sequence.max_length`.
        """
        assert length <= sequence.max_length, f"{length} positions are more than it may ever have"
        missing = self._budget.pages_for(length) - len(sequence.pages.ids)
        if missing <= 0:
            return True
        if missing + self._num_growing(besides=sequence) > self._budget.num_pages:
            return False
        pages = self._budget.take(missing)
        self._held[sequence].draft.extend(pages)
        sequence.pages.ids += pages
        self._counters.drafted += missing
        return True

    def commit_to(self, sequence: Sequence, length: int, *, reserved: int = 0) -> None:
        """Positions before `length` stand; draft pages with any of them are the sequence's own.

        Of the others those with positions before `reserved` stay drafts, the rest go back. Whatever
        is enqueued already may still write to these; whatever takes them is enqueued later. The
        caller plans nothing behind what is left until it reserves again.
        """
        draft = self._held[sequence].draft
        num_committed = len(sequence.pages.ids) - len(draft)
        kept = max(0, self._budget.pages_for(length) - num_committed)
        assert kept <= len(draft), f"{length} positions stand without a page"
        for _ in range(kept):
            self.grow(sequence)
        held = max(num_committed + kept, self._budget.pages_for(reserved))
        rejected = sequence.pages.ids[held:]
        self._counters.discarded += len(rejected)
        sequence.pages.ids = sequence.pages.ids[:held]
        self._pool.free(rejected)
        del draft[len(draft) - len(rejected) :]

    # ------------------------------------------------------------ the end

    def frees_pages(self, sequence: Sequence) -> bool:
        """Whether a page would be free or idle without this sequence; borrowed ones would not."""
        holding = self._held[sequence]
        return bool(holding.private) or (holding.node is not None and holding.node.ref_count == 1)

    def forget(self, sequence: Sequence, length: int = 0) -> None:
        """Let nobody find what it has behind `length` positions; that goes with its last holder."""
        self._prefix_cache.forget(self._held[sequence], length)

    def release(self, sequence: Sequence) -> None:
        """Take back the row, all pages and the share of the adapter.

        What may be asked again is kept until it is evicted.
        """
        assert sequence.row >= 0, f"sequence {sequence.seq_id} holds nothing to release"
        self.commit_to(sequence, 0)
        holding = self._held.pop(sequence)
        self._prefix_cache.release(sequence, holding)
        self._pool.free(holding.private)
        if sequence.adapter.key:
            self._adapters.release(sequence.adapter.key)
        self._rows.free(sequence.row)
        sequence.adapter.slot = NO_ADAPTER
        sequence.row = -1
        sequence.pages.ids = ()
        sequence.pages.capacity = 0

    def preempt(self, sequence: Sequence) -> None:
        """Release a sequence that will be admitted again."""
        self.release(sequence)
        self._counters.preempted(sequence)

    def check(self) -> None:
        """Assert that every page has one owner and every table is made of what is held."""
        check_ownership(self._pool, self._tree, self._held, self._page_size)

    def _num_growing(self, besides: Sequence | None = None) -> int:
        """Who may need one more page."""
        return sum(
            each.pages.capacity < each.max_length
            for each in self._held
            if not each.finalized and each is not besides
        )
