"""Who holds which pages, which batch row and which adapter slot."""

from __future__ import annotations

import dataclasses

from legato_engine.kv_cache.adapter_slots import NO_ADAPTER, AdapterSlots
from legato_engine.kv_cache.block_pool import BlockPool
from legato_engine.kv_cache.prefix_cache import PrefixCache, PrefixEntry
from legato_engine.kv_cache.prefix_work import PrefixWork
from legato_engine.kv_cache.slot_pool import SlotPool
from legato_engine.sequence import Sequence


class KVCacheManager:
    """Gives a sequence all it will ever need when it is admitted, and takes it back once.

    A sequence's page table is the full pages of its shared prefix, owned by the prefix's entry,
    followed by private pages up to `sequence.max_length` positions. A prefix that ends inside a
    page continues in a private copy of that page. A sequence without prefix key shares nothing.
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
        self._pool = BlockPool(num_pages)
        self._prefixes = PrefixCache(self._pool)
        self._rows = SlotPool(num_rows)
        self._adapters = AdapterSlots(num_adapter_slots)
        self._page_size = page_size
        capacity = self._pool.num_usable * page_size
        self.max_length = capacity if max_context is None else min(capacity, max_context)

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
        """Pages held by live sequences and zombies, their prefixes included."""
        return self._pool.num_usable - self._pool.num_free - self._prefixes.idle_pages

    @property
    def prefix_pages(self) -> int:
        """Pages of prefixes that nobody holds; they are evicted when needed."""
        return self._prefixes.idle_pages

    def fits_ever(self, sequence: Sequence) -> bool:
        """Whether the sequence fits an empty pool and the context."""
        if sequence.max_length > self.max_length:
            return False
        return self._num_missing(sequence, None) <= self._pool.num_usable

    def can_admit(self, sequence: Sequence) -> bool:
        """Whether `admit` would succeed now.

        A sequence whose prefix another one is about to compute waits: next time it is a hit.
        """
        if not self._rows.can_allocate() or self.lacks_adapter_slot(sequence):
            return False
        entry = self._find(sequence)
        available = self._pool.num_free + self._prefixes.idle_pages
        if entry is not None:
            if not entry.ready:
                return False
            if entry.refs == 0:
                available -= len(entry.pages)
        return self._num_missing(sequence, entry) <= available

    def lacks_adapter_slot(self, sequence: Sequence) -> bool:
        """Whether its adapter has no slot now and can have none until a holder goes."""
        return bool(sequence.adapter_key) and not self._adapters.can_acquire(sequence.adapter_key)

    def admit(self, sequence: Sequence) -> PrefixWork:
        """Set `row`, `page_ids`, `cached_tokens` and `adapter_slot`, having asked `can_admit`."""
        assert sequence.row < 0, f"sequence {sequence.seq_id} is admitted twice"
        work = self._admit_prefix(sequence)
        if not sequence.adapter_key:
            return work
        adapter = self._adapters.acquire(sequence.adapter_key)
        sequence.adapter_slot = adapter.slot
        return work if adapter.ready else dataclasses.replace(work, write_adapter=True)

    def prefill_launched(self, sequence: Sequence) -> None:
        """The launch that computes this sequence's prefix is enqueued: others may read it.

        So they may its adapter, which the same launch has written where it had to be.
        """
        entry = self._find(sequence)
        if entry is not None:
            entry.ready = True
        if sequence.adapter_key:
            self._adapters.launched(sequence.adapter_key)

    def forget_prefix(self, sequence: Sequence) -> None:
        """Let nobody join this sequence's prefix; after its last holder it is computed anew."""
        entry = self._find(sequence)
        if entry is not None:
            entry.ready = False

    def release(self, sequence: Sequence) -> None:
        """Take back the row, the private pages, and the shares of the prefix and the adapter."""
        assert sequence.row >= 0, f"sequence {sequence.seq_id} holds nothing to release"
        self._pool.free(sequence.page_ids[self._num_shared(sequence) :])
        if sequence.prefix_key is not None:
            self._prefixes.release(sequence.prefix_key)
        if sequence.adapter_key:
            self._adapters.release(sequence.adapter_key)
        self._rows.free(sequence.row)
        sequence.row = -1
        sequence.adapter_slot = NO_ADAPTER
        sequence.page_ids = ()

    def _admit_prefix(self, sequence: Sequence) -> PrefixWork:
        entry = self._find(sequence)
        if entry is not None:
            self._prefixes.acquire(entry)
            sequence.cached_tokens = entry.length
        self._prefixes.make_room(self._num_missing(sequence, entry))
        sequence.row = self._rows.allocate()
        if sequence.prefix_key is None:
            sequence.page_ids = self._pool.allocate(self._num_table_pages(sequence))
            return PrefixWork(sequence.page_ids[: self._pages(sequence.prefix_length)])
        compute: tuple[int, ...] = ()
        if entry is None:
            length = sequence.prefix_length
            entry = self._prefixes.create(sequence.prefix_key, length, self._pages(length))
            compute = entry.pages
        return PrefixWork(compute, self._extend(sequence, entry))

    def _extend(self, sequence: Sequence, entry: PrefixEntry) -> tuple[int, int] | None:
        """Build the page table behind the entry's full pages; the copy of its last, if partial."""
        assert entry.length == sequence.prefix_length, f"prefix {entry.key} has two lengths"
        shared = self._num_shared(sequence)
        private = self._pool.allocate(self._num_table_pages(sequence) - shared)
        sequence.page_ids = entry.pages[:shared] + private
        return (entry.pages[-1], private[0]) if entry.length % self._page_size else None

    def _find(self, sequence: Sequence) -> PrefixEntry | None:
        return None if sequence.prefix_key is None else self._prefixes.find(sequence.prefix_key)

    def _num_missing(self, sequence: Sequence, entry: PrefixEntry | None) -> int:
        """Pages to allocate: the private ones, and the prefix's own when nobody has computed it."""
        private = self._num_table_pages(sequence) - self._num_shared(sequence)
        computes = sequence.prefix_key is not None and entry is None
        return private + (self._pages(sequence.prefix_length) if computes else 0)

    def _num_shared(self, sequence: Sequence) -> int:
        return 0 if sequence.prefix_key is None else sequence.prefix_length // self._page_size

    def _num_table_pages(self, sequence: Sequence) -> int:
        return self._pages(sequence.max_length)

    def _pages(self, length: int) -> int:
        return -(-length // self._page_size)
