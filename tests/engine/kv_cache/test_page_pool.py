"""The page pool."""

import pytest
from legato_engine.kv_cache.page_pool import SCRATCH_PAGE, PagePool


def test_scratch_page_is_never_handed_out() -> None:
    """All pages but the scratch page are handed out, each once."""
    pool = PagePool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert SCRATCH_PAGE == 0
    assert not pool.can_allocate(1)


def test_freed_pages_come_back() -> None:
    """What was freed can be allocated again."""
    pool = PagePool(4)
    pages = pool.allocate(3)
    pool.free(pages[1:])
    assert pool.num_free == 2
    assert set(pool.allocate(2)) == set(pages[1:])


def test_double_free_asserts() -> None:
    """A page is freed once."""
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.free(pages)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.free(pages[:1])


def test_scratch_page_cannot_be_freed() -> None:
    """The scratch page never enters the pool."""
    with pytest.raises(AssertionError, match="page 0"):
        PagePool(4).free([SCRATCH_PAGE])


def test_allocating_too_many_asserts() -> None:
    """Whoever allocates has asked before."""
    pool = PagePool(4)
    assert not pool.can_allocate(4)
    with pytest.raises(AssertionError, match="asked for 4 pages"):
        pool.allocate(4)
