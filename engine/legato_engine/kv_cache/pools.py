"""Pools of pages, rows and adapter slots."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable

SCRATCH_PAGE = 0
"""Page that the padding rows of a batch write; never allocated."""


class IdPool:
    """Allocator of ids in a range: pages, rows or slots."""

    def __init__(self, ids: range) -> None:
        self._free = list(reversed(ids))
        self._allocated: set[int] = set()
        self.size = len(ids)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._allocated)

    @property
    def free_ids(self) -> tuple[int, ...]:
        return tuple(self._free)

    def can_allocate(self, count: int = 1) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        assert self.can_allocate(count), f"{count} ids requested, {len(self._free)} are free"
        ids = tuple(self._free.pop() for _ in range(count))
        self._allocated.update(ids)
        return ids

    def free(self, ids: Iterable[int]) -> None:
        for each in ids:
            assert each in self._allocated, f"{each} is freed without being allocated"
            self._allocated.remove(each)
            self._free.append(each)


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
        self._pool = IdPool(range(NO_ADAPTER + 1, num_slots + 1))
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
            assert self._idle, f"all {self._pool.size} adapter slots are in use"
            self._evict(self._idle.popitem(last=False)[1])
        (slot,) = self._pool.allocate(1)
        return slot

    def _evict(self, entry: AdapterEntry) -> None:
        del self._entries[entry.key]
        self._pool.free((entry.slot,))
