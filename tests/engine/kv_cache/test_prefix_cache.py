"""Shared prefixes."""

import pytest
from legato_engine.kv_cache.block_pool import BlockPool
from legato_engine.kv_cache.prefix_cache import PrefixCache


def idle_entry(cache: PrefixCache, key: str, num_pages: int) -> None:
    """An entry that was computed and that nobody holds."""
    cache.create(key, length=num_pages * 4, num_pages=num_pages).ready = True
    cache.release(key)


def test_an_idle_entry_keeps_its_pages() -> None:
    """An entry that nobody holds stays, and counts as idle."""
    pool = BlockPool(8)
    cache = PrefixCache(pool)
    idle_entry(cache, "a", 3)
    assert cache.find("a") is not None
    assert (cache.idle_pages, pool.num_free) == (3, 4)


def test_eviction_takes_the_least_recently_used() -> None:
    """Idle entries go oldest use first, and only as many as are needed."""
    pool = BlockPool(8)
    cache = PrefixCache(pool)
    for key in "abc":
        idle_entry(cache, key, 2)
    entry = cache.find("a")
    assert entry is not None
    cache.acquire(entry)
    cache.release("a")
    cache.make_room(3)
    assert [key for key in "abc" if cache.find(key)] == ["a", "c"]
    assert (cache.idle_pages, pool.num_free) == (4, 3)


def test_a_held_entry_is_never_evicted() -> None:
    """Eviction passes over what somebody holds, and asserts when nothing else is left."""
    pool = BlockPool(8)
    cache = PrefixCache(pool)
    idle_entry(cache, "a", 3)
    entry = cache.find("a")
    assert entry is not None
    cache.acquire(entry)
    with pytest.raises(AssertionError, match="nothing left to evict"):
        cache.make_room(5)
    assert cache.find("a") is entry


def test_an_entry_that_was_never_computed_goes_with_its_holder() -> None:
    """Nobody finds a prefix that nobody will compute; its pages are free again."""
    pool = BlockPool(8)
    cache = PrefixCache(pool)
    cache.create("a", length=8, num_pages=2)
    cache.release("a")
    assert cache.find("a") is None
    assert (cache.idle_pages, pool.num_free) == (0, 7)


def test_an_entry_that_is_not_ready_cannot_be_read() -> None:
    """A second holder waits until the computation is enqueued."""
    cache = PrefixCache(BlockPool(8))
    entry = cache.create("a", length=8, num_pages=2)
    with pytest.raises(AssertionError, match="before its computation"):
        cache.acquire(entry)


def test_releasing_too_often_asserts() -> None:
    """Holders and releases match."""
    cache = PrefixCache(BlockPool(8))
    idle_entry(cache, "a", 2)
    with pytest.raises(AssertionError, match="nobody holds it"):
        cache.release("a")
