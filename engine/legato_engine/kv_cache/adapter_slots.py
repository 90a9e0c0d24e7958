"""Adapter slots on the device."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

from legato_engine.kv_cache.slot_pool import SlotPool

NO_ADAPTER = 0
"""Never allocated."""


@dataclasses.dataclass(slots=True, eq=False)
class AdapterEntry:
    """An adapter in its slot, removed with its last reference unless it is ready."""

    key: str
    slot: int
    ref_count: int = 0  # sequences
    ready: bool = False  # its write is enqueued


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
        """Add a reference, having checked `can_acquire`; the caller writes an unready entry."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = AdapterEntry(key, self._take_slot())
        self._idle.pop(key, None)
        entry.ref_count += 1
        return entry

    def launched(self, key: str) -> None:
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

    def _take_slot(self) -> int:
        if not self._pool.can_allocate():
            assert self._idle, f"all {self._pool.num_slots - 1} adapter slots are in use"
            self._evict(self._idle.popitem(last=False)[1])
        return self._pool.allocate()

    def _evict(self, entry: AdapterEntry) -> None:
        del self._entries[entry.key]
        self._pool.free(entry.slot)
