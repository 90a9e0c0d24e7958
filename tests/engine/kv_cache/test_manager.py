"""Admission, growth and release: limits and counters."""

import pytest
from legato_engine.kv_cache.manager import KVCacheManager

from tests.engine.kv_cache.lifecycle import PAGE, admit, decode, release, sequence


def test_the_last_token_needs_no_page() -> None:
    """The last sampled token is never an input: 1 + 2 + 2 - 1 positions fit one page."""
    manager = KVCacheManager(17, PAGE, 1)
    small = sequence(0, 1, None, max_tokens=2)
    admit(manager, small)
    assert len(small.pages.ids) == 1


def test_pages_come_as_the_sequence_grows() -> None:
    """Admission allocates for the prompt and one token; then every four tokens need a page."""
    manager = KVCacheManager(17, PAGE, 1)
    one = sequence(0, 1, None, max_tokens=20)
    admit(manager, one)
    assert (len(one.pages.ids), one.pages.capacity) == (1, 4)
    assert manager.grow(one)
    assert (len(one.pages.ids), one.pages.capacity) == (2, 8)
    release(manager, one)
    assert (one.pages.capacity, manager.pages_used, manager.prefix_pages) == (0, 0, 0)


def test_admission_leaves_a_page_to_each_growing_sequence() -> None:
    """An admission leaves one page to each sequence below its maximal length."""
    manager = KVCacheManager(5, PAGE, 3)
    grows, whole = sequence(0, 1, None, max_tokens=4), sequence(1, 1, None, max_tokens=1)
    admit(manager, grows)
    admit(manager, whole)
    assert not manager.can_admit(sequence(2, 1, None, prompt=6, max_tokens=1))
    assert manager.can_admit(sequence(3, 1, None, prompt=3, max_tokens=1))


def test_the_stats_count_found_positions() -> None:
    """The hit rate relates found to all prompt positions; preemptions are counted separately."""
    manager = KVCacheManager(33, PAGE, 2)
    first, second = sequence(0, 8, prompt=4), sequence(1, 8, prompt=4)
    admit(manager, first)
    admit(manager, second)
    assert manager.stats().hit_rate == pytest.approx((8 + 3) / 24)
    assert manager.stats().shared == 3
    decode(manager, second, 6)
    manager.preempt(second)
    manager.check()
    admit(manager, second)
    stats = manager.stats()
    assert stats.hit_rate == pytest.approx((8 + 3) / 24)
    assert (stats.preemptions, stats.recomputed_tokens, second.pages.num_preemptions) == (1, 1, 1)
    assert second.pages.cached_tokens == 11
    assert second.pages.cached_length == 12


def test_a_partial_prefix_page_counts_for_can_ever_fit() -> None:
    """A miss needs one extra page when its image prefix ends inside a page."""
    manager = KVCacheManager(7, PAGE, 1)
    assert manager.can_ever_fit(sequence(0, 8, max_tokens=15))  # 24 positions, 6 pages
    assert not manager.can_ever_fit(sequence(1, 9, max_tokens=14))  # 24 positions and a copy
    assert manager.can_ever_fit(sequence(2, 9, max_tokens=10))  # 20 positions and a copy
    assert manager.can_ever_fit(sequence(3, 9, None, max_tokens=14))  # 24 positions, no sharing


def test_the_context_bounds_what_fits() -> None:
    """More positions than the model's context never fit, however large the pool."""
    manager = KVCacheManager(17, PAGE, 1, max_context=12)
    assert manager.can_ever_fit(sequence(0, 8))
    assert not manager.can_ever_fit(sequence(1, 8, max_tokens=4))


def test_rows_bound_admission() -> None:
    """Without a free row no sequence is admitted."""
    manager = KVCacheManager(17, PAGE, 1)
    admit(manager, sequence(0, 1, None))
    assert manager.rows_free == 0
    assert not manager.can_admit(sequence(1, 1, None))


def test_releasing_twice_asserts() -> None:
    """A sequence is released once per admission."""
    manager = KVCacheManager(17, PAGE, 1)
    first = sequence(0, 1, None)
    admit(manager, first)
    manager.release(first)
    with pytest.raises(AssertionError, match="holds nothing"):
        manager.release(first)
