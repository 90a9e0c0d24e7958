"""Pools of pages, rows and adapter slots."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable

SCRATCH_PAGE = 0
"""Page that the padding rows of a batch write; never allocated."""


class PagePool:
    """Allocator of the page ids `[1, num_pages)`."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, f"{num_pages} pages leave none beside the scratch page"
        self._free = list(range(num_pages - 1, SCRATCH_PAGE, -1))
        self._allocated = bytearray(num_pages)
        self.num_usable = num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_pages(self) -> tuple[int, ...]:
        return tuple(self._free)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        assert self.can_allocate(count), f"{count} pages requested, {len(self._free)} are free"
        pages = tuple(self._free.pop() for _ in range(count))
        for page in pages:
            self._allocated[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self._allocated[page], f"double free of page {page}"
            self._allocated[page] = 0
            self._free.append(page)


# ---------------------------------------------------------------- slot pool


class SlotPool:
    """Allocator of the slots `[0, num_slots)`."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 1, f"a pool of {num_slots} slots"
        self._free = list(range(num_slots - 1, -1, -1))
        self._allocated = bytearray(num_slots)
        self.num_slots = num_slots

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def can_allocate(self) -> bool:
        return bool(self._free)

    def allocate(self) -> int:
        assert self._free, f"all {self.num_slots} slots are in use"
        slot = self._free.pop()
        self._allocated[slot] = 1
        return slot

    def free(self, slot: int) -> None:
        assert 0 <= slot < self.num_slots, f"slot {slot} is not in [0, {self.num_slots})"
        assert self._allocated[slot], f"double free of slot {slot}"
        self._allocated[slot] = 0
        self._free.append(slot)


# ---------------------------------------------------------------- adapter slots

NO_ADAPTER = 0
"""Slot without an adapter; never allocated."""


@dataclasses.dataclass(slots=True, eq=False)
class AdapterEntry:
    """An adapter in its slot, removed with its last reference unless it is ready."""

    key: str
    slot: int
    ref_count: int = 0  # sequences
    ready: bool = False  # its write to the device is enqueued


class AdapterSlots:
    """Slots `[1, num_slots]` by adapter; an unused adapter stays until its slot is needed.

    A slot's adapter changes only while no sequence uses it, so no launch in flight reads it.
    """

    def __init__(self, num_slots: int) -> None:
        self._pool = SlotPool(num_slots + 1)
        none = self._pool.allocate()
        assert none == NO_ADAPTER, f"slot {none} is reserved instead of {NO_ADAPTER}"
        self._entries: dict[str, AdapterEntry] = {}
        self._idle: OrderedDict[str, AdapterEntry] = OrderedDict()  # least recently used first

    @property
    def num_used(self) -> int:
        return len(self._entries) - len(self._idle)

    def can_acquire(self, key: str) -> bool:
        entry = self._entries.get(key)
        if entry is not None:
            return entry.ready
        return self._pool.can_allocate() or bool(self._idle)

    def acquire(self, key: str) -> AdapterEntry:
        """Add a reference; the caller has checked `can_acquire` and writes an unready entry."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = AdapterEntry(key, self._allocate_slot())
        self._idle.pop(key, None)
        entry.ref_count += 1
        return entry

    def mark_ready(self, key: str) -> None:
        self._entries[key].ready = True

    def release(self, key: str) -> None:
        entry = self._entries[key]
        assert entry.ref_count > 0, f"adapter {key} is released without a reference"
        entry.ref_count -= 1
        if entry.ref_count > 0:
            return
        if entry.ready:
            self._idle[key] = entry
        else:
            self._evict(entry)

    def _allocate_slot(self) -> int:
        if not self._pool.can_allocate():
            assert self._idle, f"all {self._pool.num_slots - 1} adapter slots are in use"
            self._evict(self._idle.popitem(last=False)[1])
        return self._pool.allocate()

    def _evict(self, entry: AdapterEntry) -> None:
        del self._entries[entry.key]
        self._pool.free(entry.slot)
