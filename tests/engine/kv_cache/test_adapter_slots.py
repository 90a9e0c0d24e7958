"""Adapter slots: sharing, reuse and limits."""

import pytest
from legato_engine.kv_cache.pools import AdapterSlots


def take(slots: AdapterSlots, key: str) -> int:
    """Acquire and launch an adapter; return its slot."""
    assert slots.can_acquire(key)
    slot = slots.acquire(key).slot
    slots.mark_ready(key)
    return slot


def test_sequences_of_one_adapter_share_its_slot() -> None:
    """Slot 0 is never allocated, and an adapter is never in two slots."""
    slots = AdapterSlots(2)
    assert {take(slots, "a"), take(slots, "b")} == {1, 2}
    assert take(slots, "a") == take(slots, "a")
    assert slots.num_used == 2


def test_an_idle_adapter_stays_until_its_slot_is_needed() -> None:
    """The least recently used idle adapter is evicted, and only when a slot is needed."""
    slots = AdapterSlots(2)
    slot_of = {key: take(slots, key) for key in "ab"}
    slots.release("a")
    slots.release("b")
    assert slots.num_used == 0
    assert slots.acquire("a").ready, "still in its slot"
    slots.release("a")
    fresh = slots.acquire("c")
    assert (fresh.slot, fresh.ready) == (slot_of["b"], False)
    assert slots.acquire("a").ready


def test_used_slots_are_not_reassigned() -> None:
    """With all slots in use another adapter waits, while loaded adapters can be acquired."""
    slots = AdapterSlots(1)
    take(slots, "a")
    assert not slots.can_acquire("b")
    assert slots.can_acquire("a")
    with pytest.raises(AssertionError, match="all 1 adapter slots are in use"):
        slots.acquire("b")
    slots.release("a")
    assert slots.can_acquire("b")


def test_an_adapter_that_was_never_written_is_removed() -> None:
    """A slot is not shared before its weights are enqueued, and is freed with its last user."""
    slots = AdapterSlots(1)
    slots.acquire("a")
    assert not slots.can_acquire("a")
    slots.release("a")
    assert not slots.acquire("a").ready


def test_without_slots_no_adapter_is_acquired() -> None:
    """An engine without adapters has only the slot for no adapter."""
    assert not AdapterSlots(0).can_acquire("a")


def test_releases_match_acquires() -> None:
    """A release without an acquire asserts."""
    slots = AdapterSlots(1)
    take(slots, "a")
    slots.release("a")
    with pytest.raises(AssertionError, match="without a reference"):
        slots.release("a")
