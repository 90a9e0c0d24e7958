"""The slot pool."""

import pytest
from legato_engine.kv_cache.slot_pool import SlotPool


def test_each_slot_has_one_holder() -> None:
    """All slots are handed out, each once, and counted."""
    pool = SlotPool(3)
    assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2]
    assert not pool.can_allocate()
    assert (pool.num_used, pool.num_free) == (3, 0)
    with pytest.raises(AssertionError, match="all 3 slots"):
        pool.allocate()


def test_a_freed_slot_comes_back_once() -> None:
    """A slot is freed once and can then be taken again."""
    pool = SlotPool(2)
    slot = pool.allocate()
    pool.free(slot)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.free(slot)
    assert pool.can_allocate()


@pytest.mark.parametrize("slot", [-1, 2])
def test_foreign_slots_assert(slot: int) -> None:
    """A number outside the pool is no slot of it, negative ones included."""
    with pytest.raises(AssertionError, match="not of this pool"):
        SlotPool(2).free(slot)
