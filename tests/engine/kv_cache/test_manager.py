"""Admission and release."""

import pytest
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.kv_cache.prefix_work import PrefixWork
from legato_engine.sequence import Sequence

from tests.fakes import FakeTask, make_sequence

PAGE = 4


def sequence(
    seq_id: int, prefix_length: int, key: str | None = "k", *, prompt: int = 2, max_tokens: int = 3
) -> Sequence:
    """A sequence of `prefix_length + prompt + max_tokens - 1` positions."""
    task = FakeTask(num_prompt=prompt, max_tokens=max_tokens)
    return make_sequence(seq_id, task, prefix_key=key, prefix_length=prefix_length)


def admit(manager: KVCacheManager, admitted: Sequence) -> PrefixWork:
    """Ask, admit and launch."""
    assert manager.can_admit(admitted)
    work = manager.admit(admitted)
    manager.prefill_launched(admitted)
    return work


def test_a_miss_on_a_page_border_shares_all_prefix_pages() -> None:
    """The table starts with the entry's pages; all of them are computed, none copied."""
    manager = KVCacheManager(17, PAGE, 2)
    first = sequence(0, 8)
    work = admit(manager, first)
    assert first.page_ids[:2] == work.compute_pages
    assert work.copy_tail is None
    assert len(first.page_ids) == 3  # 12 positions
    assert (first.cached_tokens, manager.pages_used) == (0, 3)


def test_a_hit_shares_pages_and_computes_nothing() -> None:
    """A second sequence with the key reads the same pages, while the first still decodes."""
    manager = KVCacheManager(17, PAGE, 2)
    first, second = sequence(0, 8), sequence(1, 8)
    admit(manager, first)
    assert admit(manager, second) == PrefixWork()
    assert second.page_ids[:2] == first.page_ids[:2]
    assert second.page_ids[2] != first.page_ids[2]
    assert (second.cached_tokens, manager.pages_used) == (8, 4)


def test_a_partial_last_page_is_copied_by_miss_and_hit() -> None:
    """The entry keeps its partial page; every sequence continues in a private copy of it."""
    manager = KVCacheManager(17, PAGE, 2)
    first, second = sequence(0, 9), sequence(1, 9)
    work = admit(manager, first)
    assert len(work.compute_pages) == 3
    assert first.page_ids[:2] == work.compute_pages[:2]
    assert work.copy_tail == (work.compute_pages[2], first.page_ids[2])
    assert first.page_ids[2] not in work.compute_pages
    hit = admit(manager, second)
    assert hit == PrefixWork((), (work.compute_pages[2], second.page_ids[2]))
    assert manager.pages_used == 3 + 2 * 2  # 13 positions: 4 pages, 2 of them shared


def test_a_prefix_shorter_than_a_page_shares_only_through_its_copy() -> None:
    """With no full page, the whole table is private and the entry holds one page."""
    manager = KVCacheManager(17, PAGE, 2)
    first = sequence(0, 3)
    work = admit(manager, first)
    assert work.copy_tail == (work.compute_pages[0], first.page_ids[0])
    assert not set(work.compute_pages) & set(first.page_ids)


def test_without_a_key_nothing_is_shared() -> None:
    """Text-only sequences compute their own BOS in their own first page."""
    manager = KVCacheManager(17, PAGE, 2)
    first, second = sequence(0, 1, None), sequence(1, 1, None)
    assert admit(manager, first) == PrefixWork(first.page_ids[:1])
    assert admit(manager, second) == PrefixWork(second.page_ids[:1])
    assert not set(first.page_ids) & set(second.page_ids)
    manager.release(first)
    manager.release(second)
    assert (manager.pages_used, manager.prefix_pages, manager.rows_used) == (0, 0, 0)


def test_the_last_token_needs_no_page() -> None:
    """The token sampled last is never fed back: 1 + 2 + 2 - 1 positions fit one page."""
    manager = KVCacheManager(17, PAGE, 1)
    small = sequence(0, 1, None, max_tokens=2)
    admit(manager, small)
    assert len(small.page_ids) == 1


def test_release_leaves_the_prefix_for_the_next() -> None:
    """After its last holder the prefix stays, evictable, and the next one hits it."""
    manager = KVCacheManager(17, PAGE, 2)
    first = sequence(0, 9)
    admit(manager, first)
    manager.release(first)
    assert (manager.pages_used, manager.prefix_pages, manager.rows_used) == (0, 3, 0)
    assert (first.row, first.page_ids) == (-1, ())
    second = sequence(1, 9)
    assert admit(manager, second).compute_pages == ()
    assert (manager.pages_used, manager.prefix_pages) == (5, 0)


def test_idle_prefixes_are_evicted_when_pages_are_needed() -> None:
    """An idle prefix never keeps a sequence out."""
    manager = KVCacheManager(7, PAGE, 2)
    first = sequence(0, 8, "old")
    admit(manager, first)
    manager.release(first)
    second = sequence(1, 8, "new", max_tokens=14)  # 23 positions: all 6 pages
    assert admit(manager, second).compute_pages != ()
    manager.release(second)
    assert manager.prefix_pages == 2


def test_a_hit_does_not_count_on_evicting_its_own_prefix() -> None:
    """Pages of the prefix that is about to be read are no room."""
    manager = KVCacheManager(7, PAGE, 2)
    first = sequence(0, 8, "a")
    admit(manager, first)
    manager.release(first)
    blocker = sequence(1, 1, None, prompt=2, max_tokens=10)  # 12 positions: 3 of the 4 free pages
    admit(manager, blocker)
    second = sequence(2, 8, "a", max_tokens=4)  # 13 positions: 2 private pages, 1 free
    assert not manager.can_admit(second)
    manager.release(blocker)
    assert manager.can_admit(second)


def test_a_sharer_waits_until_the_prefix_is_launched() -> None:
    """Before the computing launch is enqueued a sharer is not admitted, after it it hits."""
    manager = KVCacheManager(17, PAGE, 2)
    first, second = sequence(0, 8), sequence(1, 8)
    manager.admit(first)
    assert not manager.can_admit(second)
    manager.prefill_launched(first)
    assert manager.can_admit(second)
    assert manager.admit(second).compute_pages == ()


def test_a_sharer_computes_what_an_aborted_one_did_not() -> None:
    """A prefix whose owner ended before its launch is computed by the next."""
    manager = KVCacheManager(17, PAGE, 2)
    first, second = sequence(0, 8), sequence(1, 8)
    manager.admit(first)
    manager.release(first)
    assert manager.pages_used == manager.prefix_pages == 0
    assert len(admit(manager, second).compute_pages) == 2
    assert second.cached_tokens == 0


def test_a_forgotten_prefix_lasts_as_long_as_its_holders() -> None:
    """Who holds it goes on reading it, nobody joins them, and its pages go with the last."""
    manager = KVCacheManager(17, PAGE, 3)
    first, second, third = sequence(0, 8), sequence(1, 8), sequence(2, 8)
    admit(manager, first)
    admit(manager, second)
    manager.forget_prefix(first)
    manager.release(first)
    assert manager.pages_used == 3
    assert not manager.can_admit(third)
    manager.release(second)
    assert manager.pages_used == manager.prefix_pages == 0
    assert len(admit(manager, third).compute_pages) == 2


def test_a_partial_prefix_page_counts_for_fits_ever() -> None:
    """A miss needs one page more than its table when its prefix ends inside a page."""
    manager = KVCacheManager(7, PAGE, 1)
    assert manager.fits_ever(sequence(0, 8, max_tokens=15))  # 24 positions, 6 pages
    assert not manager.fits_ever(sequence(1, 9, max_tokens=14))  # 24 positions and a copy
    assert manager.fits_ever(sequence(2, 9, max_tokens=10))  # 20 positions and a copy
    assert manager.fits_ever(sequence(3, 9, None, max_tokens=14))  # 24 positions, no sharing


def test_the_context_bounds_what_fits() -> None:
    """More positions than the model knows never fit, however large the pool."""
    manager = KVCacheManager(17, PAGE, 1, max_context=12)
    assert manager.fits_ever(sequence(0, 8))
    assert not manager.fits_ever(sequence(1, 8, max_tokens=4))


def test_rows_bound_admission() -> None:
    """Without a free row nobody is admitted."""
    manager = KVCacheManager(17, PAGE, 1)
    admit(manager, sequence(0, 1, None))
    assert manager.rows_free == 0
    assert not manager.can_admit(sequence(1, 1, None))


def test_releasing_twice_asserts() -> None:
    """What a sequence holds is taken back once."""
    manager = KVCacheManager(17, PAGE, 1)
    first = sequence(0, 1, None)
    admit(manager, first)
    manager.release(first)
    with pytest.raises(AssertionError, match="holds nothing"):
        manager.release(first)


def test_one_key_has_one_length() -> None:
    """A key names content, so two lengths under one key are a bug."""
    manager = KVCacheManager(17, PAGE, 2)
    admit(manager, sequence(0, 8))
    with pytest.raises(AssertionError, match="two lengths"):
        manager.admit(sequence(1, 9))
