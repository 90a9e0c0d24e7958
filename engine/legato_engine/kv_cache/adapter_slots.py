"""Which adapter stands in which device slot, and who holds it."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

from legato_engine.kv_cache.slot_pool import SlotPool

NO_ADAPTER = 0
"""The slot of sequences without an adapter; it is never handed out."""


@dataclasses.dataclass(slots=True, eq=False)
class AdapterEntry:
    """An adapter in its slot. `refs` counts the sequences that hold it.

    `ready` says that one more may: the launch that writes its weights there is enqueued. An entry
    that is not ready goes with its last holder.
    """

    key: str
    slot: int
    refs: int = 0
    ready: bool = False


class AdapterSlots:
    """Slots `1 .. num_slots` by adapter; one that nobody holds stays until its slot is needed.

    A slot changes hands only when no sequence holds it, so no launch in flight reads it then.
    """

    def __init__(self, num_slots: int) -> None:
        self._pool = SlotPool(num_slots + 1)
        none = self._pool.allocate()
        assert none == NO_ADAPTER, "the slot of no adapter is the first"
        self._entries: dict[str, AdapterEntry] = {}
        self._idle: OrderedDict[str, AdapterEntry] = OrderedDict()  # oldest use first

    @property
    def num_held(self) -> int:
        """Slots that sequences hold."""
        return len(self._entries) - len(self._idle)

    def can_acquire(self, key: str) -> bool:
        """Whether `acquire` would succeed now; an adapter that is about to be written waits."""
        entry = self._entries.get(key)
        if entry is not None:
            return entry.ready
        return self._pool.can_allocate() or bool(self._idle)

    def acquire(self, key: str) -> AdapterEntry:
        """One more holder; an entry that is not ready is the caller's to write.

        The caller has asked `can_acquire`.
        """
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = AdapterEntry(key, self._take_slot())
        self._idle.pop(key, None)
        entry.refs += 1
        return entry

    def launched(self, key: str) -> None:
        """The launch that writes this adapter is enqueued: others may read it."""
        self._entries[key].ready = True

    def release(self, key: str) -> None:
        """One holder less; the last one leaves a ready adapter where it is."""
        entry = self._entries[key]
        assert entry.refs > 0, f"adapter {key} is released but nobody holds it"
        entry.refs -= 1
        if entry.refs > 0:
            return
        if entry.ready:
            self._idle[key] = entry
        else:
            self._drop(entry)

    def _take_slot(self) -> int:
        if not self._pool.can_allocate():
            assert self._idle, "an adapter slot was asked, all are held"
            self._drop(self._idle.popitem(last=False)[1])
        return self._pool.allocate()

    def _drop(self, entry: AdapterEntry) -> None:
        del self._entries[entry.key]
        self._pool.free(entry.slot)
