"""Who stands in which adapter slot."""

import pytest
from legato_engine.kv_cache.adapter_slots import AdapterSlots


def take(slots: AdapterSlots, key: str) -> int:
    """Ask, acquire and launch; the slot."""
    assert slots.can_acquire(key)
    slot = slots.acquire(key).slot
    slots.launched(key)
    return slot


def test_holders_of_one_adapter_share_its_slot() -> None:
    """Slot 0 is nobody's, and one adapter never stands in two slots."""
    slots = AdapterSlots(2)
    assert {take(slots, "a"), take(slots, "b")} == {1, 2}
    assert take(slots, "a") == take(slots, "a")
    assert slots.num_held == 2


def test_an_idle_adapter_stays_until_its_slot_is_needed() -> None:
    """The least recently used of those that nobody holds gives way, and only then."""
    slots = AdapterSlots(2)
    place = {key: take(slots, key) for key in "ab"}
    slots.release("a")
    slots.release("b")
    assert slots.num_held == 0
    assert slots.acquire("a").ready, "it stands there still"
    slots.release("a")
    fresh = slots.acquire("c")
    assert (fresh.slot, fresh.ready) == (place["b"], False)
    assert slots.acquire("a").ready


def test_held_slots_are_not_taken() -> None:
    """With every slot held another adapter waits, and those that stand there do not."""
    slots = AdapterSlots(1)
    take(slots, "a")
    assert not slots.can_acquire("b")
    assert slots.can_acquire("a")
    with pytest.raises(AssertionError):
        slots.acquire("b")
    slots.release("a")
    assert slots.can_acquire("b")


def test_an_adapter_that_was_never_written_is_forgotten() -> None:
    """Nobody joins a slot before its weights are enqueued; its last holder takes it along."""
    slots = AdapterSlots(1)
    slots.acquire("a")
    assert not slots.can_acquire("a")
    slots.release("a")
    assert not slots.acquire("a").ready


def test_without_slots_nobody_gets_one() -> None:
    """An engine without adapters has only the slot of none."""
    assert not AdapterSlots(0).can_acquire("a")


def test_releases_match_acquires() -> None:
    """Giving back more than was taken is a bug that shows."""
    slots = AdapterSlots(1)
    take(slots, "a")
    slots.release("a")
    with pytest.raises(AssertionError):
        slots.release("a")
