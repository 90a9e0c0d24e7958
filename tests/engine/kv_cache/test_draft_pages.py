"""Pages that a proposal reserves: committed, or given back."""

import pytest
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.sequence import Sequence

from tests.engine.kv_cache.lifecycle import PAGE, admit, release, sequence


def test_draft_pages_are_taken_whole_or_not_at_all() -> None:
    """A proposal gets pages for all of its positions, or nothing changes."""
    manager = KVCacheManager(5, PAGE, 1)
    one = sequence(0, 1, None, max_tokens=14)
    admit(manager, one)
    assert not manager.reserve_draft(sequence_of(one, 17), 17)
    assert (len(one.pages.ids), manager.report().draft) == (1, 0)
    assert manager.reserve_draft(one, 12)
    assert (len(one.pages.ids), one.pages.capacity, manager.report().draft) == (3, 4, 2)
    assert manager.reserve_draft(one, 12)
    manager.check()
    release(manager, one)
    assert manager.pages_used == 0


def sequence_of(one: Sequence, positions: int) -> Sequence:
    """The same sequence, allowed to become that long."""
    one.task.max_tokens = positions
    return one


def test_rejected_draft_pages_are_free_at_once() -> None:
    """Pages with a position that stands are committed, all others are given back."""
    manager = KVCacheManager(9, PAGE, 1)
    one = sequence(0, 1, None, max_tokens=30)
    admit(manager, one)
    assert manager.reserve_draft(one, 16)
    drafted = one.pages.ids
    manager.commit_to(one, 5)
    manager.check()
    assert (one.pages.ids, one.pages.capacity) == (drafted[:2], 8)
    report = manager.report()
    assert (report.free, report.draft) == (6, 0)
    assert report.fragmentation_ratio == pytest.approx(2 / 3)
    assert manager.grow(one)
    assert one.pages.capacity == 12


def test_growth_takes_the_first_draft_page() -> None:
    """A position that is decoded instead of verified stands in the page drafted for it."""
    manager = KVCacheManager(9, PAGE, 1)
    one = sequence(0, 1, None, max_tokens=30)
    admit(manager, one)
    assert manager.reserve_draft(one, 12)
    drafted = one.pages.ids
    assert manager.grow(one)
    manager.check()
    assert (one.pages.ids, one.pages.capacity, manager.report().draft) == (drafted, 8, 1)


def test_a_proposal_takes_what_is_kept_and_nothing_else() -> None:
    """Kept pages give way to a draft; the pages of those who run do not."""
    manager = KVCacheManager(6, PAGE, 2)
    kept = sequence(0, 1, "", prompt=3, max_tokens=1)
    admit(manager, kept)
    release(manager, kept)
    other, one = sequence(1, 1, None, max_tokens=1), sequence(2, 1, None, max_tokens=30)
    admit(manager, other)
    admit(manager, one)
    one.task.max_tokens = 14
    assert manager.reserve_draft(one, 16)
    assert manager.prefix_pages == 0
    one.task.max_tokens = 18
    assert not manager.reserve_draft(one, 20)
    manager.check()
