"""A pool of numbered slots: batch rows, adapter slots."""

from __future__ import annotations


class SlotPool:
    """Hands out slots `0 .. num_slots - 1`, each to one holder at a time."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 1, "a slot pool needs a slot"
        self._free = list(range(num_slots - 1, -1, -1))
        self._held = bytearray(num_slots)
        self.num_slots = num_slots

    @property
    def num_free(self) -> int:
        """Slots nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Slots somebody holds."""
        return self.num_slots - len(self._free)

    def can_allocate(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free)

    def allocate(self) -> int:
        """Take a slot; the caller has asked `can_allocate`."""
        assert self._free, f"all {self.num_slots} slots are held"
        slot = self._free.pop()
        self._held[slot] = 1
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back, exactly once."""
        assert 0 <= slot < self.num_slots, f"slot {slot} is not of this pool"
        assert self._held[slot], f"slot {slot} is freed but nobody holds it"
        self._held[slot] = 0
        self._free.append(slot)
