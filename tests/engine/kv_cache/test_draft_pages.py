"""Pages reserved for draft tokens: committed, or freed."""

import pytest
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.sequence import Sequence

from tests.engine.kv_cache.lifecycle import PAGE, admit, release, sequence


def test_draft_pages_are_reserved_all_or_none() -> None:
    """Draft tokens get pages for all their positions, or nothing changes."""
    manager = KVCacheManager(5, PAGE, 1)
    one = sequence(0, 1, None, max_tokens=14)
    admit(manager, one)
    assert not manager.reserve_draft(sequence_of(one, 17), 17)
    assert (len(one.pages.ids), manager.stats().draft) == (1, 0)
    assert manager.reserve_draft(one, 12)
    assert (len(one.pages.ids), one.pages.capacity, manager.stats().draft) == (3, 4, 2)
    assert manager.reserve_draft(one, 12)
    manager.check()
    release(manager, one)
    assert manager.pages_used == 0


def sequence_of(one: Sequence, positions: int) -> Sequence:
    """Allow the sequence to grow to `positions` and return it."""
    one.task.max_tokens = positions
    return one


def test_rejected_draft_pages_are_free_at_once() -> None:
    """Pages with a committed position are cached, all others are freed."""
    manager = KVCacheManager(9, PAGE, 1)
    one = sequence(0, 1, None, max_tokens=30)
    admit(manager, one)
    assert manager.reserve_draft(one, 16)
    drafted = one.pages.ids
    manager.commit_to(one, 5)
    manager.check()
    assert (one.pages.ids, one.pages.capacity) == (drafted[:2], 8)
    stats = manager.stats()
    assert (stats.free, stats.draft) == (6, 0)
    assert stats.fragmentation_ratio == pytest.approx(2 / 3)
    assert manager.grow(one)
    assert one.pages.capacity == 12


def test_growth_takes_the_first_draft_page() -> None:
    """A position that is decoded instead of verified uses the page drafted for it."""
    manager = KVCacheManager(9, PAGE, 1)
    one = sequence(0, 1, None, max_tokens=30)
    admit(manager, one)
    assert manager.reserve_draft(one, 12)
    drafted = one.pages.ids
    assert manager.grow(one)
    manager.check()
    assert (one.pages.ids, one.pages.capacity, manager.stats().draft) == (drafted, 8, 1)


def test_draft_pages_evict_cached_pages_and_no_others() -> None:
    """Cached pages are evicted for draft tokens; pages of running sequences are not."""
    manager = KVCacheManager(6, PAGE, 2)
    cached = sequence(0, 1, "", prompt=3, max_tokens=1)
    admit(manager, cached)
    release(manager, cached)
    other, one = sequence(1, 1, None, max_tokens=1), sequence(2, 1, None, max_tokens=30)
    admit(manager, other)
    admit(manager, one)
    one.task.max_tokens = 14
    assert manager.reserve_draft(one, 16)
    assert manager.prefix_pages == 0
    one.task.max_tokens = 18
    assert not manager.reserve_draft(one, 20)
    manager.check()
