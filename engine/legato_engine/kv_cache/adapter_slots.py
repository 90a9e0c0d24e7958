"""Adapter slots on the device: which adapter each holds, and how many sequences use it."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

from legato_engine.kv_cache.slot_pool import SlotPool

NO_ADAPTER = 0
"""The slot of sequences without an adapter; it is never allocated."""


@dataclasses.dataclass(slots=True, eq=False)
class AdapterEntry:
    """An adapter in its slot; one that is not ready is removed with its last reference."""

    key: str
    slot: int
    ref_count: int = 0  # sequences
    ready: bool = False  # the launch that writes its weights is enqueued, others may acquire it


class AdapterSlots:
    """Slots `[1, num_slots]` by adapter; an unused adapter stays until its slot is needed.

    A slot changes its adapter only while no sequence uses it, so no launch in flight reads it.
    """

    def __init__(self, num_slots: int) -> None:
        self._pool = SlotPool(num_slots + 1)
        none = self._pool.allocate()
        assert none == NO_ADAPTER, f"slot {none} is reserved instead of {NO_ADAPTER}"
        self._entries: dict[str, AdapterEntry] = {}
        self._idle: OrderedDict[str, AdapterEntry] = OrderedDict()  # least recently used first

    @property
    def num_used(self) -> int:
        """Slots that sequences use."""
        return len(self._entries) - len(self._idle)

    def can_acquire(self, key: str) -> bool:
        """Whether `acquire` would succeed now; False while the adapter is not ready."""
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
        """Note that the launch that writes the adapter is enqueued: later launches may read it."""
        self._entries[key].ready = True

    def release(self, key: str) -> None:
        """Remove a reference; a ready adapter stays in its slot."""
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
