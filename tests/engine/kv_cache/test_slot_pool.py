"""The slot pool."""

import pytest
from legato_engine.kv_cache.pools import SlotPool


def test_each_slot_has_one_owner() -> None:
    """All slots are allocated, each once, and counted."""
    pool = SlotPool(3)
    assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2]
    assert not pool.can_allocate()
    assert (pool.num_used, pool.num_free) == (3, 0)
    with pytest.raises(AssertionError, match="all 3 slots"):
        pool.allocate()


def test_a_freed_slot_comes_back_once() -> None:
    """A slot is freed once and can then be allocated again."""
    pool = SlotPool(2)
    slot = pool.allocate()
    pool.free(slot)
    with pytest.raises(AssertionError, match="double free of slot"):
        pool.free(slot)
    assert pool.can_allocate()


@pytest.mark.parametrize("slot", [-1, 2])
def test_foreign_slots_assert(slot: int) -> None:
    """Slots outside the pool are refused, negative ones included."""
    with pytest.raises(AssertionError, match=r"not in \[0, 2\)"):
        SlotPool(2).free(slot)
