"""Eviction of cached pages when pages run out."""

from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.sequence import Descriptor, DraftStats, Sequence

from tests.engine.kv_cache.lifecycle import PAGE, admit, release, sequence
from tests.fakes import FakeTask, make_sequence


def test_growth_evicts_and_fails_when_nothing_is_left() -> None:
    """Cached pages are evicted; pages in use are not."""
    manager = KVCacheManager(5, PAGE, 2)
    cached = sequence(0, 1, "", prompt=7)
    admit(manager, cached)
    release(manager, cached)
    assert manager.prefix_pages == 2
    one = sequence(1, 1, None, prompt=6, max_tokens=9)
    admit(manager, one)
    assert manager.grow(one)
    assert manager.grow(one)
    assert manager.prefix_pages == 0
    assert not manager.grow(one)
    manager.check()


def test_cached_pages_are_evicted_when_pages_are_needed() -> None:
    """Cached pages never prevent an admission."""
    manager = KVCacheManager(7, PAGE, 2)
    first = sequence(0, 8, "old")
    admit(manager, first)
    release(manager, first)
    second = sequence(1, 8, "new", prompt=15, max_tokens=1)  # 23 positions: all 6 pages
    assert admit(manager, second).compute_pages != ()
    release(manager, second)
    assert manager.prefix_pages == 6


def test_the_lowest_priority_goes_first_then_the_least_recently_used() -> None:
    """Eviction is by priority, then by last use, and leaves go before their parents."""
    manager = KVCacheManager(9, PAGE, 2)
    for seq_id, (key, priority) in enumerate((("a", 1), ("b", 0), ("c", 0))):
        task = FakeTask(num_prompt=7, max_tokens=1)
        cached = make_sequence(seq_id, task, prefix_key=key, priority=priority)
        admit(manager, cached)
        release(manager, cached)
    again = sequence(3, 1, "b", prompt=7, max_tokens=1)
    admit(manager, again)
    release(manager, again)
    assert manager.prefix_pages == 6
    large = sequence(4, 1, None, prompt=15, max_tokens=1)  # 4 pages, 2 are free
    admit(manager, large)
    release(manager, large)

    def cached_of(key: str) -> int:
        return admitted_length(manager, sequence(5, 1, key, prompt=8, max_tokens=1))

    assert [cached_of(key) for key in "abc"] == [8, 8, 0]


def test_pages_of_requests_whose_draft_tokens_fail_go_before_older_ones() -> None:
    """Of one priority, the rate of accepted draft tokens comes before the last use."""
    manager = KVCacheManager(9, PAGE, 2)
    for seq_id, (key, rate) in enumerate((("old", 0.9), ("poor", 0.3), ("none", None))):
        cached = sequence(seq_id, 1, key, prompt=7, max_tokens=1)
        admit(manager, cached)
        if rate is not None:
            cached.draft_stats = DraftStats(Descriptor(0.0, 0.0, rate, 0, 0, 0))
        release(manager, cached)
    assert manager.prefix_pages == 6
    large = sequence(4, 1, None, prompt=15, max_tokens=1)  # 4 pages, 2 are free
    admit(manager, large)
    release(manager, large)
    found = [
        admitted_length(manager, sequence(5, 1, key, prompt=8, max_tokens=1))
        for key in ("old", "poor", "none")
    ]
    assert found == [8, 0, 8]


def admitted_length(manager: KVCacheManager, admitted: Sequence) -> int:
    """Admit a sequence, release it before its launch, and return what was found."""
    manager.admit(admitted)
    found = admitted.pages.cached_tokens
    release(manager, admitted)
    return found


def test_a_hit_does_not_count_on_evicting_its_own_prefix() -> None:
    """Pages of the prefix that is about to be used do not count as available."""
    manager = KVCacheManager(7, PAGE, 2)
    first = sequence(0, 8, "a", max_tokens=1)
    admit(manager, first)
    release(manager, first)
    blocker = sequence(1, 1, None, prompt=11, max_tokens=1)  # 3 of the 4 others
    admit(manager, blocker)
    second = sequence(2, 8, "a", prompt=8, max_tokens=1)  # 2 private pages
    assert not manager.can_admit(second)
    release(manager, blocker)
    assert manager.can_admit(second)
