"""A pool of numbered slots: batch rows, adapter slots."""

from __future__ import annotations


class SlotPool:
    """Allocates the slots `[0, num_slots)`, each to one owner at a time."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 1, f"a pool of {num_slots} slots"
        self._free = list(range(num_slots - 1, -1, -1))
        self._allocated = bytearray(num_slots)
        self.num_slots = num_slots

    @property
    def num_free(self) -> int:
        """Slots without an owner."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Slots with an owner."""
        return self.num_slots - len(self._free)

    def can_allocate(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free)

    def allocate(self) -> int:
        """Take a slot, having checked `can_allocate`."""
        assert self._free, f"all {self.num_slots} slots are in use"
        slot = self._free.pop()
        self._allocated[slot] = 1
        return slot

    def free(self, slot: int) -> None:
        """Give an allocated slot back."""
        assert 0 <= slot < self.num_slots, f"slot {slot} is not in [0, {self.num_slots})"
        assert self._allocated[slot], f"double free of slot {slot}"
        self._allocated[slot] = 0
        self._free.append(slot)
