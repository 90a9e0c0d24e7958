"""The KV cache manager: admission, growth, draft pages, adapter slots, eviction and pools."""

import pytest
from legato_engine.kv_cache.manager import KVCacheManager, PrefillWork
from legato_engine.kv_cache.pools import SCRATCH_PAGE, AdapterSlots, IdPool
from legato_engine.sequence import Descriptor, DraftStats, Sequence

from tests.fakes import FakeTask, make_sequence


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
    assert manager.rows.num_free == 0
    assert not manager.can_admit(sequence(1, 1, None))


def test_releasing_twice_asserts() -> None:
    """A sequence is released once per admission."""
    manager = KVCacheManager(17, PAGE, 1)
    first = sequence(0, 1, None)
    admit(manager, first)
    manager.release(first)
    with pytest.raises(AssertionError, match="holds nothing"):
        manager.release(first)


# ---------------------------------------------------------------- draft pages
# Pages reserved for draft tokens: committed, or freed.


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


# ---------------------------------------------------------------- adapter slots
# Adapter slots: sharing, reuse and limits.


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


# ---------------------------------------------------------------- eviction
# Eviction of cached pages when pages run out.


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


# ---------------------------------------------------------------- id pool


def test_scratch_page_is_never_allocated() -> None:
    """All pages but the scratch page are allocated, each once."""
    pool = IdPool(range(1, 5))
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert SCRATCH_PAGE == 0
    assert not pool.can_allocate()
    assert (pool.num_used, pool.num_free) == (4, 0)


def test_freed_pages_come_back() -> None:
    """Freed pages can be allocated again."""
    pool = IdPool(range(1, 4))
    pages = pool.allocate(3)
    pool.free(pages[1:])
    assert pool.num_free == 2
    assert set(pool.allocate(2)) == set(pages[1:])


def test_double_free_asserts() -> None:
    """A page is freed once per allocation."""
    pool = IdPool(range(1, 4))
    pages = pool.allocate(2)
    pool.free(pages)
    with pytest.raises(AssertionError, match="freed without"):
        pool.free(pages[:1])


def test_scratch_page_cannot_be_freed() -> None:
    """The scratch page never enters the pool."""
    with pytest.raises(AssertionError, match="0 is freed without"):
        IdPool(range(1, 4)).free([SCRATCH_PAGE])


def test_allocating_too_many_asserts() -> None:
    """`allocate` requires that `can_allocate` is true."""
    pool = IdPool(range(1, 4))
    assert not pool.can_allocate(4)
    with pytest.raises(AssertionError, match="4 ids requested, 3 are free"):
        pool.allocate(4)


@pytest.mark.parametrize("row", [-1, 2])
def test_foreign_ids_assert(row: int) -> None:
    """Ids outside the pool are refused, negative ones included."""
    with pytest.raises(AssertionError, match=f"{row} is freed without"):
        IdPool(range(2)).free((row,))


# ---------------------------------------------------------------- lifecycle
# Steps in the life of a sequence in a KV cache, each followed by a check.


PAGE = 4


def sequence(
    seq_id: int, prefix_length: int, key: str | None = "k", *, prompt: int = 2, max_tokens: int = 3
) -> Sequence:
    """A sequence of `prefix_length + prompt + max_tokens - 1` positions."""
    task = FakeTask(num_prompt=prompt, max_tokens=max_tokens)
    return make_sequence(seq_id, task, prefix_key=key, prefix_length=prefix_length)


def admit(manager: KVCacheManager, admitted: Sequence) -> PrefillWork:
    """Admit a sequence and launch its prefill."""
    assert manager.can_admit(admitted)
    work = manager.admit(admitted)
    manager.check()
    launch(manager, admitted)
    return work


def launch(manager: KVCacheManager, admitted: Sequence) -> None:
    """Note that its prefill is enqueued."""
    admitted.progress.last_position = admitted.length
    manager.mark_launched(admitted)
    manager.check()


def decode(manager: KVCacheManager, decoding: Sequence, *token_ids: int) -> None:
    """Commit tokens one by one and launch each; grow as needed."""
    for token_id in token_ids:
        decoding.tokens.append((token_id, (0.0, 0.0)))
        if decoding.progress.last_position >= decoding.pages.capacity:
            assert manager.grow(decoding)
        decoding.progress.last_position += 1
        manager.check()


def release(manager: KVCacheManager, ended: Sequence) -> None:
    """Release a finished sequence."""
    manager.release(ended)
    manager.check()
